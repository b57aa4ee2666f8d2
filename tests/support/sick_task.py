"""A task whose samples, loss or gradient can be made sick."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tape_task import Tape

from trainer import Outcome


@dataclasses.dataclass(frozen=True)
class Sick(Tape):
    """The tape's regression; samples from `first` up to, not including, `end` are sick."""

    first: int = 0
    end: int = 0
    way: str = "loss"
    """input: NaN in the sample; loss: an infinite loss; gradient: a finite loss whose gradient is
    NaN; spike: a loss a thousand times as high; outlier: a finite sample whose square isn't."""

    def dataset(self, split: str) -> Any:
        data = super().dataset(split)
        if split == "train" and self.way == "input":
            data.inputs[self.first : self.end] = torch.nan
        if split == "train" and self.way == "outlier":
            data.inputs[self.first : self.end] = 1e25
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
