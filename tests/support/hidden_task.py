"""A task whose model or data have hidden state, or do something that rank-invariant reduction
doesn't support, of the kind given by `way`."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome

WIDTH = 4
COUNT = {"forwards": 0}
CALLS = 0


class Net(nn.Module):
    """Two linear layers, and hidden state of the kind `way`."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.count = 0
        self.register_buffer("mean", torch.zeros(0 if way == "grows" else 1, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", None, persistent=False)
        if way == "teacher":  # equal to its student at first: updated without a change
            self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.teacher.load_state_dict(self.body.state_dict())
        elif way == "parts":
            self.own = nn.Parameter(torch.zeros(WIDTH))
        elif way == "sparse":
            self.table = nn.Embedding(5, WIDTH, sparse=True)
        elif way == "passing":
            self.register_buffer("passing", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if not self.training:
            return self.head(h)
        match self.way:
            case "assigns":
                self.mean = 0.9 * self.mean + 0.1 * h.detach().sum(0, keepdim=True)
                h = h - self.mean
            case "caches":  # created by the first forward, such as positions
                if self.cache is None:
                    self.cache = torch.arange(1.0, WIDTH + 1)
                h = h * self.cache
            case "grows":
                self.mean = torch.cat([self.mean, h.detach()])
            case "teacher":
                with torch.no_grad():
                    self.teacher.weight.lerp_(self.body.weight, 0.1)
                h = h + self.teacher(x)
            case "counts":
                self.count += 1
                h = h * (1 + 0.1 * self.count)
            case "counts elsewhere":
                COUNT["forwards"] += 1
                h = h * (1 + 0.1 * COUNT["forwards"])
            case "adds":
                self.more = nn.Linear(WIDTH, WIDTH)
                h = self.more(h)
            case "one rank":
                h = x * self.body.weight[0] if os.environ["RANK"] == "0" else h
            case "leaves out":
                self.seen += 1
                h = x if self.seen > 4 else h
            case "parts":
                with torch.no_grad():
                    self.own.add_(x.sum(0))
                h = h + self.own
            case "sparse":
                h = h + self.table(x[:, 0].mul(9).long() % 5)
            case "reentrant":  # the body is in the graph, and in a graph of the checkpoint
                h = checkpoint(self.body, h, use_reentrant=True)
            case "passing":
                self.passing += len(x)
        return self.head(h)


class Ordering(Dataset):
    """Data that depend on the previous epoch."""

    order = torch.arange(24)

    def set_epoch(self, epoch: int) -> None:
        self.order = self.order[torch.randperm(24)]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(WIDTH) * self.order[index], torch.ones(1)


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Sums of random numbers."""

    way: str = ""
    samples: int = 24

    def model(self) -> nn.Module:
        return Net(self.way)

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return None
        if self.way == "ordering data":
            return Ordering()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(24, WIDTH, generator=generator)
        if self.way == "data of a rank":
            x += int(os.environ["RANK"])
        return TensorDataset(x[:self.samples], x.sum(1, keepdim=True)[:self.samples])

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        global CALLS
        x, y = batch
        CALLS += self.way == "acts later"
        if self.way == "works in place":
            x.mul_(0.5)
        return Outcome((model(x) - y).square().sum(), len(x))


class Keeps(torch.optim.Optimizer):
    """Gradient descent with noise and a learning rate that falls with its own state."""

    def __init__(self, groups: Any, lr: float, weight_decay: float, kept: str = "state") -> None:
        super().__init__(groups, {"lr": lr})
        self.kept, self.count = kept, 0
        self.inner = [torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1  # absent in a new optimizer
            for parameter in group["params"]:
                state = self.state[parameter]
                match self.kept:
                    case "state":
                        state["shape"], state["none"] = tuple(parameter.shape), None
                        flat = state.setdefault("flat", torch.zeros(parameter.numel()))
                        parameter.sub_(flat.lerp_(parameter.grad.flatten(), 0.1)
                                       .view_as(parameter), alpha=group["lr"])
                        assert isinstance(state.setdefault("before", (1, 2)), tuple)
                    case "list":
                        state["list"] = [torch.zeros(2)]
                    case "tensor":
                        group["t"] = torch.ones(())
                    case "elsewhere":
                        self.state["all"] = {"count": 1}
                    case "attribute":
                        self.count += 1
                        parameter.mul_(1 - 0.01 * self.count)
                    case "optimizer":
                        self.inner[0].step()
                        break
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


keeps_list = partial(Keeps, kept="list")
keeps_tensor = partial(Keeps, kept="tensor")
keeps_elsewhere = partial(Keeps, kept="elsewhere")
keeps_optimizer = partial(Keeps, kept="optimizer")
keeps_attribute = partial(Keeps, kept="attribute")
