"""Tasks for tests: the samples contain their index, and each micro-batch is recorded in a file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainer import Outcome
from trainer.distributed import sync_batchnorm


def draws(data: Any) -> Tensor:
    """A number from each kind of generator; two are attributes of the data set."""
    numbers = [random.random(), np.random.rand(), data.own.random(), data.python.random(),
               torch.rand(()).item()]  # fmt: skip
    return torch.tensor(numbers, dtype=torch.float64)


class Indexed(Dataset):
    """Sample i is (i, x_i, y_i, draws): draws from each kind of generator, and the epoch."""

    def __init__(self, count: int, width: int, nan_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1234 + count)
        self.inputs = torch.randn(count, width, generator=generator)
        self.targets = torch.randn(count, generator=generator)
        if nan_at is not None:
            self.inputs[nan_at] = float("nan")
        self.own = np.random.default_rng(5)
        self.python = random.Random(5)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "x": self.inputs[index], "y": self.targets[index],
                "draws": draws(self), "epoch": self.epoch}


class Net(nn.Module):
    """A linear layer, or one with a norm and dropout before it."""

    def __init__(self, width: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential()
        if norm:
            layer = nn.BatchNorm1d(16) if norm == "batch" else nn.GroupNorm(4, 16)
            self.body.extend([nn.Linear(width, 16), layer, nn.ReLU()])
        self.body.append(nn.Dropout(dropout))
        self.head = nn.Linear(16 if norm else width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(1)


@dataclasses.dataclass(frozen=True)
class Tape:
    """Regression on numbered samples; each rank appends one line per micro-batch to its tape, also
    for a stand-in."""

    tape: str = ""
    samples: int = 20
    validation: int = 0
    width: int = 3
    norm: str = ""
    dropout: float = 0.0
    nan_at: int | None = None

    def model(self) -> nn.Module:
        return Net(self.width, self.norm, self.dropout)

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return Indexed(self.samples, self.width, self.nan_at)
        return Indexed(self.validation, self.width) if self.validation else None

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        drop = functional.dropout(torch.ones(16), 0.5, training=True)
        predicted = model(batch["x"])
        error = (predicted - batch["y"]).square()
        if self.tape:
            line = {"training": model.training, "counts": sync_batchnorm._has_samples,
                    "ids": batch["index"].tolist(),
                    "epochs": batch["epoch"].tolist(), "draws": batch["draws"].tolist(),
                    "mask": drop.tolist(), "random": [random.random(), float(np.random.rand())]}
            with open(f"{self.tape}-{os.environ.get('RANK', '0')}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        return Outcome(error.sum(), len(error), {"abs": (error.detach().sqrt().sum(), len(error))})


@dataclasses.dataclass(frozen=True)
class Unused(Tape):
    """A parameter that is unused in the loss: its gradient stays None."""

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(2, 2)
        return model


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Samples of 1, 2, 3, … valid tokens: the mean over tokens differs from the mean of means."""

    samples: int = 12

    def model(self) -> nn.Module:
        model = nn.Linear(3, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        return model

    def dataset(self, split: str) -> Dataset | None:
        return TokenSet(self.samples) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
        valid = batch["valid"]
        error = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
        return Outcome((error * valid).sum(), valid.sum())


class TokenSet(Dataset):
    """Sample i has i + 1 valid tokens of `count`."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, count, 3, generator=generator)
        self.y = torch.randn(count, count, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        valid = (torch.arange(len(self.x)) <= index).float()
        return {"x": self.x[index], "y": self.y[index], "valid": valid}


def read_tape(path: Path | str, ranks: int, *, training: bool = True) -> list[list[dict]]:
    """The lines of each rank, without those that are no training: those of the attempt's warm-up
    equal the first training line, and the trial of the first samples, in the third step, is three
    equal lines."""
    tapes = []
    for rank in range(ranks):
        lines = [json.loads(t) for t in Path(f"{path}-{rank}.jsonl").read_text().splitlines()]
        groups = [[*same] for _, same in itertools.groupby(
            line for line in lines if line["training"] == training)]
        if training:
            groups = [groups[0][:1], *(same for same in groups[1:] if len(same) < 3)]
        tapes.append([line for same in groups for line in same])
    return tapes
