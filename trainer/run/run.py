"""A run: the components that the loop uses, and the end of a run."""

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

from trainer.checkpoint import checkpointer
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.progress import TrainProgress
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.train_state import TrainState
from trainer.config.schema import Config
from trainer.data.loader import Loader
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.world import World
from trainer.errors import SaveFailed, TrainerError
from trainer.resilience.fault_injection import FaultInjector
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run.evaluate import Evaluator
from trainer.run.memory import MemoryUse
from trainer.run.pictures import Pictures
from trainer.run.prepare import Intervals
from trainer.run.run_dir import RunIdentity
from trainer.step import Step
from trainer.storage.layout import EVENTS
from trainer.storage.locks import RunLock
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.status import Phase, Rescue, Status, decide_rescue
from trainer.telemetry.step_timing import StepTiming


@dataclass(kw_only=True)
class Run:
    """Components that the training loop uses."""

    config: Config[Any]
    path: Path
    identity: RunIdentity
    world: World
    log: Log
    stop: StopSignals
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
    replica_check: ReplicaCheck
    timing: StepTiming
    reopen: Callable[[CheckpointRef], None]
    """Reopens the data and the record at the position of a checkpoint."""
    found: CheckpointRef | None
    saved_from_watchdog: bool = False
    """Whether the state is on disk after `emergency_save_from_watchdog`."""
    pictures: Pictures | None = None
    """Set on rank 0 if the task draws pictures."""
    memory: MemoryUse = field(default_factory=MemoryUse)
    card: dict[str, Any] = field(default_factory=dict)
    """Facts about the run for the start-up summary."""

    @property
    def progress(self) -> TrainProgress:
        """Position of the run."""
        return self.state.progress

    @property
    def status(self) -> Status:
        """Current phase and step of this rank."""
        return self.log.status

    @property
    def current_step(self) -> int:
        """The step in progress, or the last complete one. The warm-up counts as the next step."""
        return self.progress.step + (self.status.in_step or self.status.phase is Phase.WARM_UP)

    @property
    def must_roll_back(self) -> bool:
        """Whether the number of consecutive bad steps requires a roll-back."""
        return 0 < self.config.nonfinite.max_in_row <= len(self.progress.consecutive_bad_steps)

    def requests(self) -> tuple[bool, ...]:
        """Requests of this rank, handled after the step; one for each of `ddp.REQUESTS`.

        Raises:
            StaleAttempt: a newer attempt has taken over the run.
        """
        # on one node no rank survives the launcher
        if self.world.has_nodes or self.world.superseded:
            self.lock.check_without_waiting()
        checkpoint, metrics = self.checkpoint, self.metrics
        saved = checkpoint.has_unreported_save and metrics.durable
        recorded = self.world.is_main and metrics.must_trim
        return self.stop.requested, checkpoint.overdue, checkpoint.must_fail, saved, recorded

    def acknowledge_save(self, requests: Collection[str]) -> None:
        """React to rank 0's report on the last save and metrics.jsonl: drop durable lines, or fail.

        Raises:
            SaveFailed: the save failed, and --checkpoint.on-error is stop.
        """
        if "saved" in requests:
            self.metrics.drop(self.checkpoint.saved_step)
            self.checkpoint.confirm()
        if "recorded" in requests:  # the report is from before this step
            self.metrics.drop(self.progress.step - 1)
        if "fail" in requests:
            raise SaveFailed(self.checkpoint.failure or "rank 0 could not save")

    def draw(self, *, again: bool = True) -> None:
        """Draw the picture of this step, if the task has one (`again`: even if the file exists)."""
        if self.pictures is not None and self.progress.step:
            self.pictures.take(self.progress.step, again=again)

    def defer_worker_death_signals(self) -> None:
        """Defer torch's SIGCHLD handler while an exception would leave state that cannot be saved:
        in an update, between two steps, and after a validation. The next wait for data also
        detects the dead worker, within 5 s. Call it after the loader has started.
        """
        raise_death = signal.getsignal(signal.SIGCHLD)

        def handle(number: int, frame: FrameType | None) -> None:
            if callable(raise_death) and self._rescue(own_error=True) is not Rescue.LOST:
                raise_death(number, frame)

        if callable(raise_death) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handle)

    def close(self) -> None:
        """Regular end: end the loader processes, complete the last save, and close the files.

        Raises:
            OSError: the state or a line of metrics.jsonl could not be written.
        """
        self.loader.close()
        self.timing.close()
        self.checkpoint.close()
        self.metrics.close()

    def emergency_save(self, *, own: bool = False) -> bool:
        """After a failure, break the connections to the other ranks, then save the last step
        boundary if `decide_rescue` allows it.

        Args:
            own: this rank itself failed, by an exception; otherwise a peer died.

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
        if rescue is Rescue.LOST or self.world.superseded:
            return False
        if self.must_roll_back and self.progress.step >= self.intervals.total:
            return False  # a restart at the last step could not warm up
        if rescue is Rescue.RESTORE_BUFFERS_AND_SAVE:
            if self.step.moves_parameters:
                self.log.warning(f"step {self.progress.step} isn't saved: this model's forward "
                                 "changes parameters, and a forward had started")
                return False
            if not self.step.holds_boundary_lock and not self.step.boundary_lock.acquire(
                    timeout=self.world.launch.grace_s):
                return False  # another thread saves, and ends the process
            self.step.buffers.put_back()
        return self._save_alone(noticed_s)

    def emergency_save_from_watchdog(self, *, lost: bool = True) -> bool:
        """Like `emergency_save`, from another thread while the main thread computes or is blocked.

        Possible only inside a step before its update: only buffers have changed, and there are
        copies of them. Afterwards the main thread cannot update. On a GPU the copy uses a separate
        stream, since a running kernel may never end.

        Args:
            lost: a peer has died; otherwise the time limit of a stop has passed.

        Returns:
            Whether a save could be tried; `saved_from_watchdog` says whether it succeeded.
        """
        noticed_s = time.perf_counter()
        if (not self.checkpoint.overlap or self.step.buffers.was_reassigned
                or not self.step.boundary_lock.acquire(blocking=False)):
            return False
        if lost and self.world.size > 1:
            self.log.event("lost-peer", failed_step=self.current_step)
        with self.step.side_stream():
            kept = {live.data_ptr(): copy for live, copy in self.step.buffers.pairs()}
            self.saved_from_watchdog = self._save_alone(noticed_s, kept)
        return True

    def _save_alone(
        self, noticed_s: float, kept: Mapping[int, Tensor] | None = None
    ) -> bool:
        self.checkpoint.abandon()
        step, began_s = self.progress.step, time.perf_counter()
        try:
            if why := checkpointer.reason_not_to_save(
                self.path / EVENTS, self.checkpoint.store, self.state,
                left_s=self.world.launch.grace_s - (began_s - noticed_s),
                generation=self.checkpoint.generation, interval=self.intervals.checkpoint,
            ):  # fmt: skip
                self.log.warning(why)
                self.log.event("save-left-out", at_step=step, why=why)
                return False
            try:
                saved = self.checkpoint.save_alone(kept)
            except OSError:  # try once more: the disk may have free space again
                saved = self.checkpoint.save_alone(kept)
        except (OSError, TrainerError, RuntimeError) as error:  # it must not hide the first error
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
        """Close the files after a failure, without raising another error. Loader processes end with
        this process.
        """
        self.timing.close()
        self.checkpoint.abandon()
        with contextlib.suppress(OSError):  # the checkpoints hold the lines too
            self.metrics.close()
