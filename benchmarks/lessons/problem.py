"""A small problem for `mistakes`, and a training loop whose order of operations is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

RIGHT = ("zero_grad", "forward", "backward", "clip", "step", "schedule")
BATCH, STEPS, CLASSES = 64, 40, 10
@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten overlapping clouds in 32 dimensions: 512 points to train on, 300 held out."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 32, generator=generator)
    y = torch.randint(CLASSES, (812,), generator=generator)
    x = centres[y] + 1.5 * torch.randn(812, 32, generator=generator)
    return x[:512], y[:512], x[512:], y[512:]


def net(norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """A model with the same initial weights each time."""
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(64)] if norm else []
    middle += [nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
    return nn.Sequential(nn.Linear(32, 64), *middle, nn.Linear(64, CLASSES))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass
class Run:
    """The result of a loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    used: list[float] = field(default_factory=list)
    """Norm of the gradient that each update used."""
    reported: list[float] = field(default_factory=list)
    """What clip_grad_norm_ returned."""
    rates: list[float] = field(default_factory=list)
    """Learning rates as fractions of the optimizer's."""

    @property
    def loss(self) -> float:
        """The loss on the training samples in eval mode."""
        return loss_of(self.model, *data()[:2])


def loop(order: Sequence[str] = RIGHT, *, model: nn.Module | None = None,
         make: Callable[[Any], torch.optim.Optimizer] = adamw, clip: float = math.inf,
         loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy, steps: int = STEPS,
         schedule: Callable[[Any], Any] = lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0),
         scaler: torch.amp.GradScaler | None = None) -> Run:  # fmt: skip
    """`steps` times the operations in the given order."""
    model = net() if model is None else model
    run = Run(model, make(model.parameters()))
    rates, x, y = schedule(run.optimizer), *data()[:2]
    generator, value = torch.Generator().manual_seed(2), torch.zeros(())
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        for name in order:
            if name == "zero_grad":
                run.optimizer.zero_grad()
            elif name == "forward":
                value = loss(model(x[chosen]), y[chosen])
            elif name == "backward":
                (scaler.scale(value) if scaler else value).backward()
            elif name == "unscale":
                scaler.unscale_(run.optimizer)  # type: ignore[union-attr]
            elif name == "clip":
                run.reported.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            elif name == "step":
                run.rates.append(run.optimizer.param_groups[0]["lr"] / run.optimizer.defaults["lr"])
                if scaler:
                    scaler.step(run.optimizer)
                    scaler.update()
                else:
                    run.optimizer.step()
                run.used.append(norm_of(model))
            else:
                rates.step()
    return run


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))


@torch.no_grad()
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return float(functional.cross_entropy(model(x), y))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The accuracy on held-out samples, in the mode that the model is in."""
    x, y = data()[2:]
    return float((model(x).argmax(1) == y).float().mean())


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(v, b.state_dict()[n]) for n, v in a.state_dict().items())


def moved(model: nn.Module) -> float:
    """The largest change of a weight from `net()`."""
    return float((flat(model.parameters()) - flat(net().parameters())).abs().max())


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """As one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors if tensor is not None])


def gradient(model: nn.Module, *losses: Callable[[], Tensor]) -> Tensor:
    """The gradient of the sum of these losses, one backward after the other."""
    model.zero_grad()
    for loss in losses:
        loss().backward()
    return flat(p.grad for p in model.parameters())


def quarters(model: nn.Module, divide: float = 4) -> list[Callable[[], Tensor]]:
    """The losses of four micro-batches of 16 samples."""
    x, y, *_ = data()
    return [lambda i=i: functional.cross_entropy(model(x[i:i + 16]), y[i:i + 16]) / divide
            for i in range(0, 64, 16)]


def apart(a: Tensor, b: Tensor) -> float:
    """Relative distance of two gradients."""
    return float((a - b).norm() / b.norm())
