"""A task that can show each problem for which there is a hint."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer import Outcome
from trainer.telemetry.classification import confusion


class Net(nn.Module):
    """Points of the plane → two logits; with a batch norm and a layer without gradient."""

    def __init__(self, *, dead: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.blind = nn.Linear(2, 2) if dead else None

    def forward(self, points: Tensor) -> Tensor:
        logits = self.body(points)
        return logits if self.blind is None else logits + 0 * self.blind(points)


@dataclasses.dataclass(frozen=True)
class Hinted:
    """Whether a point is above a line."""

    scale: float = 1.0
    shuffled: bool = False
    leaked: bool = False
    dead: bool = False

    def model(self) -> nn.Module:
        return Net(dead=self.dead)

    def dataset(self, split: str) -> TensorDataset | None:
        if split == "test":
            return None
        generator = torch.Generator().manual_seed(int(split != "train" and not self.leaked))
        points = torch.randn(400, 2, generator=generator)
        labels = (points.sum(1) > 0).long()
        if self.shuffled:
            labels = torch.randint(0, 2, (400,), generator=generator)
        return TensorDataset(points, labels)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        points, labels = batch
        logits = model(points)
        total = self.scale * functional.cross_entropy(logits, labels, reduction="sum")
        found = logits.detach().argmax(1)
        table = None if model.training else confusion(found, labels, 2)
        return Outcome(total, len(labels), {"accuracy": ((found == labels).sum(), len(labels))},
                       table)
