"""Tasks whose batches are lists or objects, and whose loss can't take 0 samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer import Outcome

WIDTH = 8


class Graph:
    """Several clouds of points as one object, as graph libraries make them."""

    def __init__(self, clouds: list[Tensor]) -> None:
        self.points = torch.cat(clouds)
        sizes = torch.tensor([len(cloud) for cloud in clouds])
        self.owner = torch.arange(len(clouds)).repeat_interleave(sizes)

    def __len__(self) -> int:
        return int(self.owner[-1]) + 1  # an IndexError if there is none


class Stream(IterableDataset):
    def __init__(self, clouds: list[Tensor]) -> None:
        self.clouds = clouds

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.clouds)


class Net(nn.Module):
    """A perceptron on points, with a buffer that moves in each forward."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.head = nn.Linear(16, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + len(points)
        return self.head(self.norm(self.body(points)).relu())


@dataclasses.dataclass(frozen=True)
class Clouds:
    """Regress the sum of each cloud's points.

    Args:
        samples: of training; a multiple of the micro-batch size leaves no short micro-batch.
        graphs: a batch is a `Graph`; False: a list of clouds.
        norm: a batch norm in the model, otherwise a layer norm.
        calls: the loss calls collectives, in training and evaluation.
    """

    samples: int = 32
    graphs: bool = False
    norm: bool = False
    stream: bool = False
    calls: bool = False

    def model(self) -> nn.Module:
        return Net(norm=self.norm)

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(len(split))
        count = {"train": self.samples, "validation": 9, "test": 2}[split]
        clouds = [torch.randn(2 + i % 4, WIDTH, generator=generator) for i in range(count)]
        return Stream(clouds) if self.stream else clouds

    def collate(self, samples: list[Tensor]) -> Any:
        return Graph(samples) if self.graphs else samples

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        graph = batch if self.graphs else Graph(batch)
        points, count = graph.points, len(graph)
        if self.graphs:
            graph.points = None  # an object that is changed: the next use needs its own
        found = torch.zeros(count).index_add(0, graph.owner, model(points).squeeze(1))
        wanted = torch.zeros(count).index_add(0, graph.owner, points.sum(1))
        total = (found - wanted).square().sum()
        if self.calls and dist.is_initialized():
            sums = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(sums, total.detach())
        return Outcome(total, count, {"error": ((found - wanted).detach().abs().sum(), count)})
