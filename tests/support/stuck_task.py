"""A task that hangs once at a chosen place, or is slow."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from tape_task import Indexed, Tape
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from trainer import Outcome


def once(marks: str, name: str) -> bool:
    """Whether this is the first call, over all processes and attempts."""
    try:
        Path(marks, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class StuckSamples(Indexed):
    """In a loader worker, reading one sample never ends, and another one stops the worker."""

    def __init__(self, count: int, width: int, *, marks: str, endless: int, stops: int) -> None:
        super().__init__(count, width)
        self.marks, self.endless, self.stops = marks, endless, stops

    def __getitem__(self, index: int) -> dict[str, Any]:
        if get_worker_info() is not None:
            if index == self.endless and once(self.marks, "endless"):
                time.sleep(3600)
            if index == self.stops and once(self.marks, "stops"):
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


@dataclasses.dataclass(frozen=True)
class Stuck(Tape):
    """The `Tape` task, hanging once per run at each chosen place."""

    marks: str = ""
    """An empty folder, created by the test."""
    endless: int = -1
    """Sample whose read never ends."""
    stops: int = -1
    """Sample whose loader worker is stopped."""
    busy_at: int = -1
    """Forward in training, counted in each process, in which rank 0 computes for a minute."""
    first_s: float = 0.0
    """Seconds that the first forward of each process sleeps."""
    validation_s: float = 0.0
    """Seconds that each forward of a validation sleeps."""

    def dataset(self, split: str) -> Dataset | None:
        if split == "train" and self.marks:
            return StuckSamples(self.samples, self.width, marks=self.marks, endless=self.endless,
                                stops=self.stops)
        return super().dataset(split)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        count = COUNT[0] = COUNT[0] + model.training
        if not model.training:
            time.sleep(self.validation_s)
        elif count == 1:
            time.sleep(self.first_s)
        elif count == self.busy_at and os.environ.get("RANK") == "0" and once(self.marks, "busy"):
            until_s, noise = time.monotonic() + 60, torch.ones(300, 300)
            while time.monotonic() < until_s:
                noise = torch.mm(noise, noise).sign()
        return super().loss(model, batch)


COUNT = [0]
