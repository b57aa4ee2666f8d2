"""The parts of a run, together: what the loop works with, and how it ends."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    @property
    def current_step(self) -> int:
        """The step in the making, or else the last one made. The warm-up is the next one's."""
        return self.progress.step + (self.step.in_progress or self.log.phase == "warm-up")

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

    def survive(self, *, own: bool = False) -> None:
        """A rank has failed: let the others know at once, then save the boundary that this one
        holds.

        Before the update of a step nothing but buffers has moved; after it no collective follows.
        While the weights are not those of the run (warm-up, restore, the test of the best ones),
        there is nothing to save that isn't on disk.

        Args:
            own: this rank itself has failed, by an exception; otherwise a peer is dead. What an
                exception in the update, or in what follows it, leaves behind is not saved.
        """
        self.world.abandon()
        step, phase = self.step, self.log.phase
        if not own:
            self.log.event("lost-peer", failed_step=self.current_step)
        if phase not in ("train", "evaluate"):
            return
        if own and (step.updating or (phase == "train" and not step.in_progress)):
            return
        if step.in_progress:
            step.buffers.put_back()
        began = time.perf_counter()
        try:
            saved = self.checkpoint.save_alone()
        except (OSError, CheckpointBusy, StaleAttempt) as error:
            self.log.warning(f"step {self.progress.step} could not be saved: {error}")
            return
        if saved is not None:
            self.log.event("save", at_step=saved, kind="survivor",
                           seconds=round(time.perf_counter() - began, 6))

    def abandon(self) -> None:
        """The end after a failure, which it must not hide: keep what can be kept.

        Loader processes end with this one.
        """
        self.checkpoint.abandon()
        with contextlib.suppress(OSError):  # the lines travel in the checkpoints too
            self.metrics.close()
