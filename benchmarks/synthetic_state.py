"""A training state of any size, and the checkpointer that saves it as in a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.checkpointer import Checkpointer, RunRecord
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.progress import BestTracker, LossMeter, ScheduleLengths, TrainProgress
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.config import schema
from trainer.config.schema import Optim, Schedule
from trainer.distributed.world import LaunchInfo, World
from trainer.optim import optimizers, schedules
from trainer.telemetry.events import Log

LAYERS = 24


@dataclass
class Subject:
    """A model of `LAYERS` blocks with AdamW after one update, and its training state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainState
    width: int

    @property
    def live(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        return [t for tensors in self.state.tensors().values() for t in tensors.values()]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.live)

    def dictionary(self) -> dict[str, Any]:
        """The state as most scripts save it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def make_subject(megabytes: float) -> Subject:
    """A subject whose state (model and both moments) has about this size."""
    width = max(8, round((megabytes * 1e6 / 3 / 4 / LAYERS) ** 0.5))
    blocks = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
              for _ in range(LAYERS)]
    model = nn.Sequential(*blocks)
    optimizer = optimizers.make_optimizer(Optim(), model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    horizon = ScheduleLengths(epoch=100, total=1000)
    state = TrainState(
        model=model, optimizer=optimizer,
        schedule=schedules.Scheduler(Schedule(), optimizer, horizon),
        scaler=torch.amp.GradScaler("cpu", enabled=False), progress=TrainProgress(),
        best=BestTracker(), meter=LossMeter(), seed=0, num_ranks=1, parts={"horizon": horizon},
    )  # fmt: skip
    return Subject(model, optimizer, state, width)


def make_checkpointer(
    subject: Subject, store: Store | Path, mirror: MirrorUploads | None = None
) -> Checkpointer:
    """The checkpointer of a run, with a store, or one in a folder that keeps one checkpoint."""
    world = World.form(device="cpu", threads=torch.get_num_threads(), launch=LaunchInfo())
    if isinstance(store, Path):
        store = Store(store, run="benchmark", keep=1)
    return Checkpointer(
        store=store, state=subject.state, world=world, log=Log(),
        record=RunRecord(run_id="benchmark", attempt={}, mirror=mirror),
        config=schema.Checkpoint(on_error="stop"),
    )  # fmt: skip
