"""The parts of a run, together: what the loop works with, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from trainer import budget
from trainer.agreement import Agreement
from trainer.checkpoint import Checkpointer
from trainer.config import Config
from trainer.data.loader import Loader
from trainer.errors import SaveFailed, TrainerError
from trainer.evaluate import Evaluator
from trainer.faults import FaultInjector
from trainer.folder import EVENTS, Identity
from trainer.lock import RunLock
from trainer.log import Log
from trainer.memory import Memory
from trainer.metrics import Metrics
from trainer.pictures import Pictures
from trainer.prepare import Intervals
from trainer.progress import Progress
from trainer.pulse import ProgressMarks
from trainer.source import Found
from trainer.state import TrainState
from trainer.status import Phase, Rescue, Status, decide_rescue
from trainer.step import Step
from trainer.stop import StopRequest
from trainer.timing import Timing
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
    faults: FaultInjector
    marks: ProgressMarks
    lock: RunLock
    state: TrainState
    step: Step
    loader: Loader
    validate: Evaluator | None
    test: Evaluator | None
    checkpoint: Checkpointer
    metrics: Metrics
    intervals: Intervals
    agreement: Agreement
    timing: Timing
    reopen: Callable[[Found], None]
    """Opens the data and the record once more, at the place of a checkpoint."""
    found: Found | None
    kept_beside: bool = False
    """Whether `survive_beside` has brought the state to disk."""
    pictures: Pictures | None = None
    """Where the task draws some, on rank 0."""
    memory: Memory = field(default_factory=Memory)
    card: dict[str, Any] = field(default_factory=dict)
    """What the run consists of, for people."""

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        return self.state.progress

    @property
    def status(self) -> Status:
        """What this rank is doing."""
        return self.log.status

    @property
    def current_step(self) -> int:
        """The step that has begun, or else the last complete one. The warm-up is the next one's."""
        return self.progress.step + (self.status.in_step or self.status.phase is Phase.WARM_UP)

    @property
    def row_is_full(self) -> bool:
        """Whether so many steps in a row were bad that the run has to go back."""
        return 0 < self.config.nonfinite.max_in_row <= len(self.progress.bad_row)

    def wishes(self) -> tuple[bool, ...]:
        """What this rank wants to happen after the step: one for each of `parallel.WISHES`.

        Raises:
            StaleAttempt: the run goes on elsewhere, without this attempt.
        """
        if self.world.has_nodes or self.world.stale:  # on one node nobody outlives the launcher
            self.lock.look()
        saved = self.checkpoint.has_news and self.metrics.durable
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

    def spare_updates(self) -> None:
        """Let no death of a loader process, which torch raises at whatever line the rank is, strike
        amid an update or what follows it, or where a validation is taken into the state: of these
        nothing could be kept. The next wait for data notices it as well, within 5 s. Once the
        loader reads.
        """
        strike = signal.getsignal(signal.SIGCHLD)

        def handle(number: int, frame: FrameType | None) -> None:
            if callable(strike) and self._rescue(own_error=True) is not Rescue.LOST:
                strike(number, frame)

        if callable(strike) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handle)

    def close(self) -> None:
        """The orderly end: loader processes, the last save, the files.

        Raises:
            OSError: the state or a line of metrics.jsonl couldn't be written.
        """
        self.loader.close()
        self.timing.close()
        self.checkpoint.close()
        self.metrics.close()

    def survive(self, *, own: bool = False) -> bool:
        """A rank has failed: let the others know at once, then save the boundary that this one
        holds.

        `decide_rescue` says what can be saved.

        Args:
            own: this rank itself has failed, by an exception; otherwise a peer is dead.

        Returns:
            Whether nothing is lost: the state is on disk.
        """
        noticed_s = time.perf_counter()
        self.world.abandon()
        if not own:
            self.log.event("lost-peer", failed_step=self.current_step)
        rescue = self._rescue(own_error=own)
        if rescue is Rescue.NOTHING_LOST:
            return True
        if rescue is Rescue.LOST or self.world.stale:
            return False
        if self.row_is_full and self.progress.step >= self.intervals.total:
            return False  # a start that has to go back from the last step has no step to warm up by
        if rescue is Rescue.RESTORE_BUFFERS_AND_SAVE:
            if self.step.moves_parameters:
                self.log.warning(f"step {self.progress.step} isn't saved: this model's forward "
                                 "moves parameters, and one had begun")
                return False
            if not self.step.shut and not self.step.gate.acquire(
                    timeout=self.world.launch.grace_s):
                return False  # another thread is at it, and ends the process
            self.step.buffers.put_back()
        return self._save_alone(noticed_s)

    def survive_beside(self, *, lost: bool = True) -> bool:
        """As `survive`, in another thread: the main thread computes, or will never come back.

        Inside a step before its update only, where nothing moves but buffers, of which there are
        copies; from then on the main thread can't make its update. On a GPU this copies on a
        stream of its own, beside a kernel that may never end.

        Args:
            lost: a peer is gone; otherwise the time to stop is over.

        Returns:
            Whether it could be tried; `kept_beside` tells what came of it.
        """
        noticed_s = time.perf_counter()
        if (not self.checkpoint.overlap or self.step.buffers.strayed
                or not self.step.gate.acquire(blocking=False)):
            return False
        if lost and self.world.size > 1:
            self.log.event("lost-peer", failed_step=self.current_step)
        with self.step.beside():
            kept = {live.data_ptr(): copy for live, copy in self.step.buffers.pairs()}
            self.kept_beside = self._save_alone(noticed_s, kept)
        return True

    def _save_alone(
        self, noticed_s: float, kept: Mapping[int, Tensor] | None = None
    ) -> bool:
        self.checkpoint.abandon()
        step, began_s = self.progress.step, time.perf_counter()
        try:
            if why := budget.why_not(
                self.path / EVENTS, self.checkpoint.store, self.state,
                left_s=self.world.launch.grace_s - (began_s - noticed_s),
                generation=self.checkpoint.generation, interval=self.intervals.checkpoint,
            ):  # fmt: skip
                self.log.warning(why)
                self.log.event("save-left-out", at_step=step, why=why)
                return False
            try:
                saved = self.checkpoint.save_alone(kept)
            except OSError:  # once more, as that of a stop: there may be room again
                saved = self.checkpoint.save_alone(kept)
        except (OSError, TrainerError, RuntimeError) as error:  # it must not hide the first one
            self.log.warning(f"step {step} could not be saved: {error}")
            return False
        if saved is not None:
            self.log.event("save", at_step=saved, kind="survivor",
                           seconds=round(time.perf_counter() - began_s, 6))
        return True

    def _rescue(self, *, own_error: bool) -> Rescue:
        ema = self.state.ema
        return decide_rescue(self.status, own_error=own_error,
                             exchanging_weights=ema is not None and ema.exchanging)

    def abandon(self) -> None:
        """The end after a failure, which it must not hide: keep what can be kept.

        Loader processes end with this one.
        """
        self.timing.close()
        self.checkpoint.abandon()
        with contextlib.suppress(OSError):  # the lines travel in the checkpoints too
            self.metrics.close()
