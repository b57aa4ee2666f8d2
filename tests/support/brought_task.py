"""Small tasks as users write them, which only a check at the start can tell from exact ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome

SCALE = nn.Parameter(torch.zeros(()))


@dataclass(frozen=True)
class Regression:
    """Exact."""

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def dataset(self, split: str) -> Dataset | None:
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(64 if split == "train" else 10, 8, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        return Outcome((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


class Mean(Regression):
    """The mean, with the number of samples as its count."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        return Outcome(functional.mse_loss(model(batch[0]), batch[1]), len(batch[0]))


class MeanMetric(Regression):
    """A metric that is a mean."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        error = (model(batch[0]) - batch[1]).square()
        return Outcome(error.sum(), len(error), {"error": (error.detach().mean(), len(error))})


class Outside(Regression):
    """A trainable weight of the loss, which is no part of the model."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        error, count = (model(batch[0]) - batch[1]).square().sum(), len(batch[0])
        return Outcome(error * (-SCALE).exp() + count * SCALE, count)


class OnlyTraining(Regression):
    """A loss that can't be computed in eval mode, as that of torchvision's detectors."""

    def dataset(self, split: str) -> Dataset | None:
        return super().dataset(split) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        if not model.training:
            raise TypeError("no losses in eval mode")
        return super().loss(model, batch)


class Adapted(nn.Module):
    """A frozen layer and an adapter behind torch's reentrant checkpoint, whose input needs no
    gradient, so neither gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.adapter, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):
            return self.head(checkpoint(lambda h: self.body(h) + self.adapter(h), x,
                                        use_reentrant=True))


class Reentrant(Regression):
    def model(self) -> nn.Module:
        return Adapted()


class Flat(torch.optim.Optimizer):
    """Keeps its state in another shape than the parameter's."""

    def __init__(self, groups: Any, lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros(p.numel()))
                p.sub_(mean.lerp_(p.grad.flatten(), 0.1).view_as(p), alpha=group["lr"])


class Listing(Flat):
    """Keeps a tuple in a list, which JSON gives back as a list."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [(1, 2)]
