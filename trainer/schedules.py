"""Learning-rate schedules as factors of the peak, stepped once per optimizer update."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer.config import Schedule


def factor(config: Schedule, update: int, *, epoch: int, total: int) -> float:
    """The rate of the `update`-th update (from 0) as a part of the peak.

    The warm-up rises linearly from 1 / steps (an update with rate 0 would do nothing) and reaches
    the peak at its last step; the cosine reaches `min_ratio` at the run's last update and stays.

    Args:
        epoch: optimizer steps in an epoch.
        total: optimizer steps in the run.
    """
    warmup = min(config.warmup.steps(epoch=epoch, total=total), total)
    if update < warmup:
        return (update + 1) / warmup
    if config.name == "constant":
        return 1.0
    done = min(1.0, (update + 1 - warmup) / max(1, total - warmup))
    return config.min_ratio + (1 - config.min_ratio) * (1 + math.cos(math.pi * done)) / 2


class Lengths(Protocol):
    """What a schedule is laid out for, in optimizer steps; read anew at each update."""

    epoch: int
    total: int


def build(config: Schedule, optimizer: torch.optim.Optimizer, lengths: Lengths) -> LambdaLR:
    """torch's scheduler of the configuration; its `step` follows each update."""
    return LambdaLR(
        optimizer,
        lambda update: factor(config, update, epoch=lengths.epoch, total=lengths.total),
    )
