"""The parts of a run, together: what the loop works with, and how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer import faults
from trainer.checkpoint import Checkpointer
from trainer.config import Config
from trainer.data.loader import Loader
from trainer.errors import CheckpointBusy, StaleAttempt
from trainer.evaluate import Evaluator
from trainer.folder import Identity
from trainer.log import Log
from trainer.metrics import Metrics
from trainer.prepare import Intervals
from trainer.progress import Progress
from trainer.source import Found
from trainer.state import TrainState
from trainer.step import Step
from trainer.stop import StopRequest
from trainer.world import World


@dataclass(kw_only=True)
class Parts:
    """Everything that the loop works with."""

    config: Config[Any]
    path: Path
    identity: Identity
    world: World
    log: Log
    stop: StopRequest
    faults: faults.Faults
    state: TrainState
    step: Step
    loader: Loader
    validate: Evaluator | None
    test: Evaluator | None
    checkpoint: Checkpointer
    metrics: Metrics
    intervals: Intervals
    found: Found | None
    card: dict[str, Any] = field(default_factory=dict)
    """What the run consists of, for people."""

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        return self.state.progress

    def wishes(self) -> tuple[bool, ...]:
        """What this rank wants to happen after the step: one for each of `parallel.WISHES`."""
        saved = self.checkpoint.committed and self.metrics.durable
        return self.stop.requested, self.checkpoint.overdue, self.checkpoint.must_fail, saved

    def close(self) -> None:
        """The orderly end: loader processes, the last save, the files.

        Raises:
            OSError: the state or a line of metrics.jsonl couldn't be written.
        """
        self.loader.close()
        self.checkpoint.close()
        self.metrics.close()

    def survive(self) -> None:
        """A peer is dead: let the others know at once, then save the boundary that this rank holds.

        Before the update of a step nothing but buffers has moved; after it no collective follows.
        While the weights are not those of the run (warm-up, restore, the test of the best ones),
        there is nothing to save that isn't on disk.
        """
        self.world.abandon()
        self.log.event("lost-peer")
        if self.log.phase not in ("train", "evaluate"):
            return
        if self.step.in_progress:
            self.step.buffers.put_back()
        self._save_alone()

    def survive_beside(self) -> bool:
        """As `survive`, in another thread: the main thread computes, or will never come back.

        Inside a step before its update only, where nothing moves but buffers, of which there are
        copies; from then on the main thread can't make its update. On a GPU this copies on a
        stream of its own, beside a kernel that may never end.

        Returns:
            whether it could be tried.
        """
        if not self.checkpoint.overlap or not self.step.gate.acquire(blocking=False):
            return False
        if self.world.size > 1:
            self.log.event("lost-peer")
        with self.step.beside():
            kept = {live.data_ptr(): copy for live, copy in self.step.buffers.pairs()}
            self._save_alone(kept)
        return True

    def _save_alone(self, kept: Mapping[int, Tensor] | None = None) -> None:
        began = time.perf_counter()
        try:
            step = self.checkpoint.save_alone(kept)
        except (OSError, CheckpointBusy, StaleAttempt) as error:
            self.log.warning(f"step {self.progress.step} could not be saved: {error}")
            return
        if step is not None:
            self.log.event("save", at_step=step, kind="survivor",
                           seconds=round(time.perf_counter() - began, 6))

    def abandon(self) -> None:
        """The end after a failure, which it must not hide: keep what can be kept.

        Loader processes end with this one.
        """
        self.checkpoint.abandon()
        with contextlib.suppress(OSError):  # the lines travel in the checkpoints too
            self.metrics.close()
