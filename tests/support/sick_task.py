"""A task whose samples, loss or gradient can be made non-finite."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tape_task import Tape
from torch import Tensor, nn

from trainer import Outcome


class Centred(nn.Module):
    """A model with a running mean of its inputs."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.model(x)


@dataclasses.dataclass(frozen=True)
class Sick(Tape):
    """The regression of `Tape`; samples from `first` up to, not including, `end` are bad."""

    first: int = 0
    end: int = 0
    way: str = "loss"
    """input: NaN in the sample; loss: infinite loss; gradient: finite loss with NaN gradient;
    spike: a loss 1000 times as high; outlier: a finite sample whose square is infinite."""
    centred: bool = False

    def model(self) -> nn.Module:
        model = super().model()
        return Centred(model, self.width) if self.centred else model

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        values = {"input": torch.nan, "outlier": 1e25}
        if split == "train" and self.way in values:
            data.inputs[self.first : self.end] = values[self.way]
        return data

    def loss(self, model: Any, batch: dict[str, Any]) -> Outcome:
        outcome = super().loss(model, batch)
        sick = (batch["index"] >= self.first) & (batch["index"] < self.end)
        if not sick.any():
            return outcome
        total = outcome.total
        if self.way == "loss":
            total = total * torch.inf
        elif self.way == "gradient":
            total = total + (model(batch["x"]) * 0).abs().sqrt().sum()
        elif self.way == "spike":
            total = total * 1000
        return dataclasses.replace(outcome, total=total)
