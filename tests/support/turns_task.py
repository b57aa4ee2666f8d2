"""A task with several optimizers, in turns if its flag says so, and with methods for the moments of
a run: what they change decides the bits."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer import Outcome
from trainer.config.schema import Clip, Duration, Schedule

WIDTH = 6


class Pair(nn.Module):
    """A body with batch norm and dropout, a head, and a slow copy of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(),
                                  nn.Dropout(0.1))
        self.head = nn.Linear(8, 1)
        self.slow = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h) / self.temperature + 0.1 * self.slow(h).detach()


@dataclasses.dataclass(frozen=True)
class Turns:
    """Regression, the body against the head; `together`: the sum of both losses at once."""

    samples: int = 96
    together: bool = False
    plain: bool = False
    """Without dropout and the slow copy, and with moments that draw no random numbers."""
    muon: bool = False
    """Muon for the matrices and AdamW for the rest; else SGD for the body and Adam for the head."""

    @property
    def turns(self) -> tuple[str, ...]:
        return () if self.together else ("head", "head", "body")

    def model(self) -> nn.Module:
        plain = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        return plain if self.plain else Pair()

    def dataset(self, split: str) -> TensorDataset | None:
        if split == "test":
            return None
        x = torch.randn(self.samples, WIDTH, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def optimizers(self, model: Any) -> dict[str, Any]:
        if self.plain:
            body, head = model[0].parameters(), model[2].parameters()
        else:
            body, head = model.body.parameters(), model.head.parameters()
        constant = Schedule(name="constant", warmup=Duration(0))
        if self.muon:
            matrices, rest = ([p for p in model.parameters() if p.requires_grad
                               and (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
            return {"muon": torch.optim.Muon(matrices, lr=0.02),
                    "adamw": (torch.optim.AdamW(rest, lr=0.01), constant, Clip(norm=0.1))}
        return {"body": torch.optim.SGD(body, lr=0.05, momentum=0.9),
                "head": (torch.optim.Adam(head, lr=0.01), constant, Clip(norm=0.1))}

    def loss(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], turn: str | None = None
    ) -> Outcome:
        x, y = batch
        error = (model(x) - y).square().sum()
        if turn == "body":
            return Outcome({"error": error, "size": 1e-3 * model(x).square().sum()}, len(x))
        return Outcome(getattr(self, "scale", 1.0) * error, len(x),
                       {} if turn else {"error": (error.detach(), len(x))})

    def after_step(self, model: Any, step: int) -> None:
        if self.plain:
            model[0].weight.div_(model[0].weight.norm().clamp(min=1.5) / 1.5)
        else:
            model.slow.weight.lerp_(model.head.weight, 0.1)
            model.slow.bias.add_(0.01 * torch.randn(1) * random.random())
            model.temperature = model.temperature * 1.01
            model.body[0].weight.div_(model.body[0].weight.norm().clamp(min=1.5) / 1.5)

    def epoch(self, number: int) -> None:
        drawn = 0.0 if self.plain else random.random()
        object.__setattr__(self, "scale", 1.0 + 0.5 * number + drawn)
