"""What the rows of `wrong_orders` share: the list of them, a small problem, and a loop whose order
of operations is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

RIGHT = ("zero_grad", "forward", "backward", "clip", "step", "schedule")
BATCH, STEPS, CLASSES = 64, 40, 10
Found = tuple[str, bool]
"""What was measured, in words, and whether the row's claim holds."""


@dataclass(frozen=True)
class Row:
    """A mistake."""

    name: str
    change: str
    happens: str
    measure: Callable[[], Found]


ROWS: list[Row] = []


def row(change: str, happens: str) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """List a mistake; the function that measures it gives it its name."""
    def listed(measure: Callable[[], Found]) -> Callable[[], Found]:
        ROWS.append(Row(measure.__name__.replace("_", "-"), change, happens, measure))
        return measure
    return listed


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten overlapping clouds in 32 dimensions: 512 points to train on, 300 held out."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 32, generator=generator)
    y = torch.randint(CLASSES, (812,), generator=generator)
    x = centres[y] + 1.5 * torch.randn(812, 32, generator=generator)
    return x[:512], y[:512], x[512:], y[512:]


def net(norm: bool = False, dropout: float = 0.0, momentum: float = 0.1) -> nn.Sequential:
    """The same first weights each time."""
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(64, momentum=momentum)] if norm else []
    middle += [nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
    return nn.Sequential(nn.Linear(32, 64), *middle, nn.Linear(64, CLASSES))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass
class Run:
    """What a loop came to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    used: list[float] = field(default_factory=list)
    """Norm of the gradient that each update used."""
    told: list[float] = field(default_factory=list)
    """What clip_grad_norm_ returned."""
    rates: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """On the training samples, in eval mode."""
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
                run.told.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            elif name == "step":
                run.rates.append(run.optimizer.param_groups[0]["lr"])
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
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(nn.utils.get_total_norm(gradients))


@torch.no_grad()
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    return float(functional.cross_entropy(model(x), y))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Held out, in the mode that the model is in."""
    x, y = data()[2:]
    return float((model(x).argmax(1) == y).float().mean())


def same(a: nn.Module, b: nn.Module) -> bool:
    """Bit by bit."""
    return all(torch.equal(v, b.state_dict()[n]) for n, v in a.state_dict().items())


def moved(model: nn.Module) -> float:
    """The largest change of a weight since `net()`."""
    return max(float((p - q).detach().abs().max()) for p, q in
               zip(model.parameters(), net().parameters(), strict=True))


def gradient(model: nn.Module, *losses: Callable[[], Tensor]) -> Tensor:
    """Of the sum of some losses, one backward after the other, as one vector."""
    model.zero_grad()
    for loss in losses:
        loss().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def apart(a: Tensor, b: Tensor) -> float:
    """Relative distance of two gradients."""
    return float((a - b).norm() / b.norm())
