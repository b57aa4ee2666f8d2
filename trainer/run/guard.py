"""Requests of a rank, emergency saves, and the end of a run in whatever way."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

from torch import Tensor

from trainer.checkpoint import checkpointer
from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.train_state import TrainState
from trainer.data.loader import Loader
from trainer.errors import SaveFailed, TrainerError
from trainer.resilience.fault_injection import FaultInjector
from trainer.run.context import Context
from trainer.run.prepare import Intervals
from trainer.storage.layout import EVENTS
from trainer.storage.locks import RunLock
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.status import Phase, Rescue, decide_rescue
from trainer.telemetry.step_timing import StepTiming


class Clock:
    """Measures whether `every_s` seconds (0: never due) have passed since the last start. In a run
    that goes on nobody knows when that was, so it is due at once (`expired`)."""

    def __init__(self, every_s: float, *, expired: bool) -> None:
        self._every_s = every_s
        self._started_s = -math.inf if expired else time.monotonic()

    def restart(self) -> None:
        self._started_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        return 0 < self._every_s <= time.monotonic() - self._started_s


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Guards a run, from its warm-up on."""

    context: Context
    intervals: Intervals
    lock: RunLock
    faults: FaultInjector
    state: TrainState
    boundary: StepBoundary
    checkpoint: Checkpointer
    loader: Loader
    metrics: Metrics
    timing: StepTiming
    validation_clock: Clock
    mirror: MirrorUploads | None = None

    @property
    def current_step(self) -> int:
        """The step in progress (the next one in the warm-up), or the last complete one."""
        status = self.context.status
        return self.state.progress.step + (status.in_step or status.phase is Phase.WARM_UP)

    @property
    def must_roll_back(self) -> bool:
        """Whether the number of consecutive bad steps requires a roll-back."""
        most = self.context.config.nonfinite.max_in_row
        return 0 < most <= len(self.state.progress.consecutive_bad_steps)

    def requests(self) -> tuple[bool, ...]:
        """Requests of this rank, handled after the step, as `ddp.REQUESTS` names them. Raises
        StaleAttempt if a newer attempt has taken over the run."""
        world, checkpoint = self.context.world, self.checkpoint
        if world.has_nodes or world.superseded:  # on one node no rank survives the launcher
            self.lock.check_without_waiting()
        saved = checkpoint.has_unreported_save and self.metrics.flush()
        recorded = world.is_main and self.metrics.sync_if_long()
        stop = self.context.stop.requested
        validate = world.is_main and self.validation_clock.is_due
        return stop, checkpoint.overdue, checkpoint.fatal is not None, saved, recorded, validate

    def acknowledge_save(self, requests: Collection[str]) -> None:
        """React to rank 0's reports on the last save and metrics.jsonl; may raise SaveFailed."""
        if "saved" in requests:
            self.metrics.drop(self.checkpoint.confirm())
        if "recorded" in requests:  # the report is from before this step
            self.metrics.drop(self.state.progress.step - 1)
        if "fail" in requests:
            raise self.checkpoint.fatal or SaveFailed("rank 0 could not save or upload")

    def defer_worker_death_signals(self) -> None:
        """Defer torch's SIGCHLD handler, which the loader has set, while its exception would leave
        state that cannot be saved. The next wait for data detects the dead worker too."""
        raise_death = signal.getsignal(signal.SIGCHLD)

        def handle(number: int, frame: FrameType | None) -> None:
            if callable(raise_death) and self._rescue(own_error=True) is not Rescue.LOST:
                raise_death(number, frame)

        if callable(raise_death) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handle)

    def emergency_save(self, *, own: bool = False) -> bool:
        """After a failure of this rank (`own`) or of a peer, break the connections to the other
        ranks, then save the last step boundary if possible. Returns whether it is on disk."""
        world, log, step = self.context.world, self.context.log, self.state.progress.step
        noticed_s = time.perf_counter()
        world.abandon()
        if not own:
            log.event("lost-peer", failed_step=self.current_step)
        rescue = self._rescue(own_error=own)
        if rescue is Rescue.NOTHING_LOST:
            return True
        if rescue is Rescue.LOST or world.superseded:
            return False
        if self.must_roll_back and step >= self.intervals.total:
            return False  # a restart at the last step could not warm up
        with self._failure_logged():
            if rescue is Rescue.RESTORE_BUFFERS_AND_SAVE:
                if not self.boundary.only_buffers_change:
                    log.warning(f"step {step} isn't saved: this model's forward changes "
                                "parameters, and a forward had started")
                    return False
                if not self.boundary.close(world.launch.grace_s):
                    return False  # another thread saves, and ends the process
                if self.boundary.on_cuda and not self.boundary.buffers.was_reassigned:
                    return self._save_beside(noticed_s)  # a kernel may wait for the lost rank
                self.boundary.buffers.put_back()
            return self._save_alone(noticed_s)
        return False

    def emergency_save_from_watchdog(self, *, lost: bool = True) -> bool | None:
        """Like `emergency_save`, from another thread while the main thread computes or is blocked,
        since a peer is `lost` or the time limit of a stop has passed; None if it is not possible.

        It is possible only inside a step before its update: only buffers have changed, and there
        are copies of them. Afterwards the main thread cannot update. On a GPU the copy uses a
        separate stream, since a running kernel may never end.
        """
        noticed_s = time.perf_counter()
        if not self.boundary.take():
            return None
        if lost and self.context.world.size > 1:
            self.context.log.event("lost-peer", failed_step=self.current_step)
        with self._failure_logged():
            return self._save_beside(noticed_s)
        return False

    @contextlib.contextmanager
    def _failure_logged(self) -> Iterator[None]:
        """Context of a save that must not hide the error before it, after which a GPU may refuse
        every call."""
        try:
            yield
        except (OSError, TrainerError, RuntimeError) as error:
            step = self.state.progress.step
            self.context.log.warning(f"step {step} could not be saved: {error}")

    def _save_beside(self, noticed_s: float) -> bool:
        """Save the boundary with the copies of the buffers, whatever the main stream of a GPU does.
        """
        with self.boundary.side_stream():
            kept = {live.data_ptr(): copy for live, copy in self.boundary.buffers.pairs()}
            return self._save_alone(noticed_s, kept)

    def _save_alone(self, noticed_s: float, kept: Mapping[int, Tensor] | None = None) -> bool:
        checkpoint, log, step = self.checkpoint, self.context.log, self.state.progress.step
        began_s = time.perf_counter()
        checkpoint.abandon()
        left_s = self.context.world.launch.grace_s - (began_s - noticed_s)
        if why := checkpointer.reason_not_to_save(
                self.context.path / EVENTS, checkpoint.store, self.state, left_s=left_s,
                generation=checkpoint.generation, interval=self.intervals.checkpoint):
            log.warning(why)
            log.event("save-left-out", at_step=step, why=why)
            return False
        try:
            saved = checkpoint.save_alone(kept)
        except OSError:  # try once more: the disk may have free space again
            saved = checkpoint.save_alone(kept)
        if saved is not None:
            log.event("save", at_step=saved, kind="survivor",
                      seconds=round(time.perf_counter() - began_s, 6))
        return True

    def _rescue(self, *, own_error: bool) -> Rescue:
        ema = self.state.ema
        return decide_rescue(self.context.status, own_error=own_error,
                             exchanging_weights=ema is not None and ema.exchanging)

    def close(self) -> None:
        """End regularly. Raises OSError if the state or a metric line could not be written."""
        self.loader.close()
        self.timing.close()
        self.checkpoint.close()
        self.metrics.close()

    def abandon(self) -> None:
        """Close the files after a failure, without raising another error."""
        self.timing.close()
        self.checkpoint.abandon()
        with contextlib.suppress(OSError):  # the checkpoints hold the lines too
            self.metrics.close()

    def release(self) -> None:
        """Give back what the run holds, in a process that continues."""
        if self.mirror is not None:
            self.mirror.close()
        self.loader.close()
        self.lock.close()
        self.checkpoint.store.close()
