"""The task of `benchmarks/gpu_day.sh`: a small CNN that can refuse host waits, or never end."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from benchmarks.small_tasks import Rows
from trainer import Outcome
from trainer.distributed.ddp import Objective

FIRST = 20
"""The forward from which waits are refused: allocations and autotuning are over."""
_FORWARDS = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Waits:
    refuse_waits: bool = False
    """Raise where the host waits for the GPU from the first forward of a step to its update, except
    for the step's sums."""
    stuck_at: int = 0
    """Start a kernel that never ends, once in this run, at this forward of rank 0."""

    def model(self) -> nn.Module:
        if self.refuse_waits and torch.cuda.is_available():
            Objective.read_sums = _may_wait(Objective.read_sums)  # type: ignore[method-assign]
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 10))

    def dataset(self, split: str) -> Dataset | None:
        generator = torch.Generator().manual_seed(0)
        return Rows(torch.randn(512, 3, 32, 32, generator=generator),
                    torch.randint(10, (512,), generator=generator)) if split == "train" else None

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        images, labels = batch
        forward = next(_FORWARDS)
        if self.refuse_waits and forward >= FIRST and images.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        if forward == self.stuck_at and os.environ.get("RANK", "0") == "0" and images.is_cuda:
            mark = Path(tempfile.gettempdir(), "stuck")  # gpu_day.sh has a folder of its own
            if not mark.exists():
                mark.touch()
                torch.cuda._sleep(1 << 62)
        logits = model(images)
        right = (logits.detach().argmax(1) == labels).sum()
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return Outcome(total, len(labels), {"accuracy": (right, len(labels))})

    def after_step(self, model: nn.Module, step: int) -> None:
        if self.refuse_waits and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")  # saves, and the end of the run, may wait


def _may_wait(read: Any) -> Any:
    """Allow the one wait of a step, which reads its sums."""
    def read_sums(*arguments: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return read_sums
