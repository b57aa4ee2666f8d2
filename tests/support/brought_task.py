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


class OnlyTraining(Regression):
    """A loss that can't be computed in eval mode, as that of torchvision's detectors."""

    def dataset(self, split: str) -> Dataset | None:
        return super().dataset(split) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        if not model.training:
            raise TypeError("no losses in eval mode")
        return super().loss(model, batch)


class Grouped(OnlyTraining):
    """A loss that needs four samples."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        return Regression.loss(self, model, [part.reshape(-1, 4, *part.shape[1:]).flatten(0, 1)
                                             for part in batch])


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


class Taught(nn.Linear):
    """Averages its weights in a module that is hidden in a list, so that it isn't trained."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.teacher = [nn.Linear(8, 1).requires_grad_(False)]
        self.teacher[0].load_state_dict(self.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        teacher = self.teacher[0]
        if self.training:
            teacher.weight.data = teacher.weight.data.lerp(self.weight.data, 0.5)
        return super().forward(x) + teacher(x)


class HiddenTeacher(Regression):
    def model(self) -> nn.Module:
        return Taught()


class Centred(nn.Linear):
    """Statistics in a dict, which only an evaluation reads."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.statistics = {"mean": torch.zeros(8)}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x - self.statistics["mean"])
        self.statistics["mean"] = self.statistics["mean"].lerp(x.mean(0), 0.1)
        return super().forward(x - x.mean(0))


class HiddenStatistics(Regression):
    def model(self) -> nn.Module:
        return Centred()


class Cast(nn.Module):
    """Half of it is in bf16, which autocast allows; keeps its input, to derive by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.clone().requires_grad_(True)
        return self.head(self.norm(self.body(self.x).float()))


class Unusual(Regression):
    """Exact, with samples that are mixed with each other."""

    def model(self) -> nn.Module:
        return Cast()

    def collate(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        other = torch.randperm(len(x))
        return x.lerp(x[other], 0.3), y.lerp(y[other], 0.3)


class LeftOut(nn.Module):
    """Leaves out layers at random, in training: others for another number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(len(x))[-1] > 0.5:
                x = x + layer(x)
        return self.head(x)


class LayerDrop(Regression):
    def model(self) -> nn.Module:
        return LeftOut()


class Slope(Regression):
    """A sum whose gradient is that of a mean."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        total = (model(batch[0]) - batch[1]).square().sum()
        mean = total / len(batch[0])
        return Outcome(total.detach() + mean - mean.detach(), len(batch[0]))


class Penalty(Regression):
    """A penalty on the gradient, also in evaluation, where there is none."""

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        x = batch[0].detach().requires_grad_()
        output = model(x)
        slope, = torch.autograd.grad(output.sum(), x, create_graph=True)
        return Outcome((output - batch[1]).square().sum() + slope.square().sum(), len(x))


class Listing(torch.optim.SGD):
    """Keeps a tuple in a list, which JSON gives back as a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [(1, 2)]
