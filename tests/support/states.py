"""A training state around a model and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trainer.checkpoint.progress import BestTracker, LossMeter, TrainProgress
from trainer.checkpoint.train_state import TrainState


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer, **fields: Any) -> TrainState:
    return TrainState(**{
        "model": model, "optimizer": optimizer, "schedule": LambdaLR(optimizer, lambda _: 1.0),
        "scaler": torch.amp.GradScaler("cpu", enabled=False), "progress": TrainProgress(),
        "best": BestTracker(), "meter": LossMeter(), "seed": 0, "num_ranks": 1, **fields})
