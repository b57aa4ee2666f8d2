"""A task for runs that are disturbed from outside: its steps are slow, and its metrics encode the
samples that each step has consumed."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import torch
from runs import steps
from tape_task import Indexed, Net
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer import Outcome

SAMPLES, BITS = 48, 12
"""A metric encodes the samples of a group of 12 by one bit each; float32 keeps it exact."""


@dataclasses.dataclass(frozen=True)
class Paced:
    """Regression on 48 numbered samples."""

    pace_s: float = 0.05
    """Seconds per micro-batch, until the file `hurry` exists."""
    hurry: str = ""
    norm: str = "batch"

    def model(self) -> nn.Module:
        return Net(3, self.norm, 0.2)

    def dataset(self, split: str) -> Dataset | None:
        return {"train": Indexed(SAMPLES, 3), "validation": Indexed(8, 3)}.get(split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
        if model.training and not os.path.exists(self.hurry):
            time.sleep(self.pace_s)
        error = (model(batch["x"]) - batch["y"]).square()
        index = batch["index"]
        metrics = {}
        for group in range(SAMPLES // BITS):
            bit = index - group * BITS
            bits = torch.where((bit >= 0) & (bit < BITS), 2.0**bit, 0.0)
            metrics[f"bits_{group}"] = (bits.sum(), len(error))
        return Outcome(error.sum(), len(error), metrics)


def consumed(run: Path) -> list[frozenset[int]]:
    """The samples of each step in metrics.jsonl, which must have each step once and in order."""
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    masks = [sum(round(line[f"bits_{group}"] * line["samples"]) << group * BITS
                 for group in range(SAMPLES // BITS)) for line in lines]
    return [frozenset(i for i in range(SAMPLES) if mask >> i & 1) for mask in masks]
