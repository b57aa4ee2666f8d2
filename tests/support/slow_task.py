"""A task with slow samples, losses or models, without an effect on the results."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

from tape_task import Indexed, Tape
from torch import nn
from torch.utils.data import Dataset

from trainer import Outcome


def wait(what: str) -> None:
    """Sleep for the seconds in an environment variable."""
    time.sleep(float(os.environ.get(f"SLOW_{what}_S", "0")))


class SlowSet(Dataset):
    """`Indexed` with slow reads."""

    def __init__(self, samples: Indexed, split: str) -> None:
        self._samples, self._split = samples, split

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        wait(self._split.upper())
        return self._samples[index]


@dataclasses.dataclass(frozen=True)
class Slow(Tape):
    """`Tape`; the seconds come from SLOW_TRAIN_S, SLOW_VALIDATION_S, SLOW_TEST_S (a sample),
    SLOW_LOSS_S (a forward), SLOW_MODEL_S and SLOW_THREAD_S (lifetime of an extra thread)."""

    def model(self) -> nn.Module:
        wait("MODEL")
        return super().model()

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            threading.Thread(target=wait, args=("THREAD",), name="upload").start()
        samples = super().dataset(split)
        return None if samples is None else SlowSet(samples, split)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        if model.training:
            wait("LOSS")
        return super().loss(model, batch)
