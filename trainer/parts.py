"""The parts of a run, together: what the loop works with, and how it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import faults
from trainer.agreement import Agreement
from trainer.checkpoint import Checkpointer
from trainer.config import Config
from trainer.data.loader import Loader
from trainer.errors import CheckpointBusy, NonFinite, SaveFailed, StaleAttempt
from trainer.evaluate import Evaluator
from trainer.folder import Identity
from trainer.log import Log
from trainer.metrics import Metrics
from trainer.pictures import Pictures
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
    agreement: Agreement
    reopen: Callable[[Found], None]
    """Opens the data and the record once more, at the place of a checkpoint."""
    found: Found | None
    pictures: Pictures | None = None
    """Where the task draws some, on rank 0."""
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

    def heed_saves(self, wishes: Collection[str]) -> None:
        """What rank 0 tells of the last save, in the sums of a step: it is whole, or has failed.

        Raises:
            SaveFailed: it has, with --checkpoint.on-error stop.
        """
        if "saved" in wishes:
            self.metrics.forget(self.checkpoint.saved_step)
            self.checkpoint.forget()
        if "fail" in wishes:
            raise SaveFailed(self.checkpoint.failure or "rank 0 could not save")

    def draw(self, *, again: bool = True) -> None:
        """Draw the step's picture where the task has one (`again`: also if it is there)."""
        if self.pictures is not None and self.progress.step:
            self.pictures.take(self.progress.step, again=again)

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
        began = time.perf_counter()
        try:
            step = self.checkpoint.save_alone()
        except (OSError, CheckpointBusy, StaleAttempt, NonFinite) as error:
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
