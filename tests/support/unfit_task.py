"""A task whose model does something that rank-invariant reduction doesn't support, or hardly
supports."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome

WIDTH = 6


class Net(nn.Module):
    """`way` selects the unusual behaviour."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Embedding(5, WIDTH, sparse=way == "sparse")
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        if way == "teacher":
            self.teacher = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
        if way == "passing":
            self.register_buffer("passing", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "skips" and not len(x):
            return self.head(x.new_zeros(0, WIDTH, dtype=torch.float32))
        h = self.body(self.table(x))
        if self.way == "reentrant":  # the body is in the graph, and in a graph of the checkpoint
            h = checkpoint(self.body, h, use_reentrant=True)
        if self.way == "passing":
            self.passing += len(x)
        if self.way == "teacher":
            with torch.no_grad():
                self.teacher.lerp_(self.body.weight, 0.1)
            h = h + functional.linear(h, self.teacher)
        return self.head(h.relu())


@dataclasses.dataclass(frozen=True)
class Unfit:
    """Regression of numbers from an embedding table."""

    way: str = "skips"
    samples: int = 13

    def model(self) -> nn.Module:
        return Net(self.way)

    def dataset(self, split: str) -> Dataset[Any] | None:
        if split != "train":
            return None
        x = torch.arange(self.samples) % 5
        return TensorDataset(x, x.float().cos()[:, None])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        x, y = batch
        return Outcome((model(x) - y).square().sum(), len(x))
