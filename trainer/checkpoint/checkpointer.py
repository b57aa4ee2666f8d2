"""Asynchronous checkpoints: copy the state in memory, write it in a thread, load it again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.manifest import StagedCheckpoint
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.restore import CheckpointRef, abandon_newer, restore_model, restore_state
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.config import schema
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import World
from trainer.errors import CheckpointBusy, CheckpointDamaged, NonFinite, SaveFailed, TrainerError
from trainer.resilience.progress_marks import ProgressMarks
from trainer.storage import files, tensorfile
from trainer.storage.layout import MODEL, OPTIMIZER, STATE
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What each checkpoint records about the run besides its training state."""

    run_id: str
    attempt: Mapping[str, Any]
    """Further entries of state.json (settings, circumstances)."""
    metrics: Metrics = field(default_factory=Metrics)
    """Each save contains its pending lines and first makes the written ones durable."""
    generation: int = 0
    """The least generation of the saves."""
    mirror: MirrorUploads | None = None
    """Uploads the saves, on rank 0."""


@dataclass
class SaveJob:
    """A checkpoint for the writer thread, and how far it is."""

    step: int
    kind: str
    tensors: dict[str, dict[str, Tensor]]
    facts: dict[str, Any]
    protect: set[int]
    """Steps whose checkpoints are not pruned."""
    is_published: bool = False
    error: BaseException | None = None


def reason_not_to_save(
    events: Path, store: Store, state: TrainState, *, generation: int, interval: int,
    left_s: float,
) -> str | None:  # fmt: skip
    """Why an emergency save should not be started, or None: by the speed of the last save in
    `events` it would take longer than `left_s`, *and* a complete checkpoint is at most `interval`
    steps old."""
    step = state.progress.step
    kept = max((info.step for info in store.checkpoints() if info.why is None
                and info.generation == generation and info.step <= step), default=None)
    if kept is None or kept <= step - interval:
        return None
    needed_s = seconds_needed(events, sum(map(tensorfile.data_size, state.tensors().values())))
    if needed_s is None or needed_s <= left_s:
        return None
    return (f"step {step} is not saved: by the speed of the last save this would take "
            f"{needed_s:.0f} s, and the launcher leaves {left_s:.0f} s; the checkpoint of step "
            f"{kept} is complete")


def seconds_needed(events: Path, size: int) -> float | None:
    """Estimated seconds to save `size` bytes at the speed of the last save; None if unknown."""
    saves = [e for e in read_events(events)
             if e.get("event") == "save" and e.get("bytes") and "seconds" in e]
    return saves[-1]["seconds"] * size / saves[-1]["bytes"] if saves else None


SURVIVORS_WAIT = 2 / 3
"""Part of the launcher's grace time that a survivor waits for another survivor's save."""


NOTHING = (-1, -1)
"""In place of a saved boundary: its step, and the last validated step that it holds."""


class Checkpointer:
    """Saves the training state at step boundaries: copies it in memory, then writes it in a thread
    of each rank that writes a run folder (rank 0, and the first rank of each node with its own
    disk)."""

    def __init__(
        self, *, store: Store, state: TrainState, world: World, log: Log, record: RunRecord,
        config: schema.Checkpoint, marks: ProgressMarks | None = None,
        boundary: StepBoundary | None = None,
    ) -> None:  # fmt: skip
        self.store, self.generation = store, record.generation
        self.waits = 0
        """Saves that had to wait for the previous one."""
        self.blocked_s = 0.0
        """Seconds for which `save` has blocked the training so far."""
        self._state, self._world, self._log = state, world, log
        self._record, self._config, self._marks = record, config, marks or ProgressMarks()
        self._mirror = record.mirror
        self._boundary = boundary or StepBoundary(state.model, log.status)
        # One thread for all saves: waking it costs the training 10 µs, starting one 100-200 µs.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._job: SaveJob | None = None  # the last one of this rank's writer
        self._writing: Future[None] | None = None  # until its result is reported
        self._has_failed = False  # whether a save has failed since the last one that succeeded
        self._started, self._started_kind = NOTHING, ""  # boundary of the last save
        self._started_s = time.monotonic()
        self._confirmed = NOTHING  # the last save that all ranks know to be complete
        self._last_good_step = -1  # of the newest save without a bad step directly before it
        self._unverified_best = 0  # step of the best weights that an earlier attempt has saved
        # The best weights until they are known to be on disk: a later state may only be saved after
        # them. If rank 0 dies while it saves them, rank 1 does it, from its own copy. The other
        # ranks have none and save nothing; the next start computes the steps again.
        self._unconfirmed_best: SaveJob | None = None

    @property
    def overdue(self) -> bool:
        """Whether a save by the clock is due; decided by rank 0's clock."""
        every_s, past_s = self._config.every_s, time.monotonic() - self._started_s
        return bool(every_s) and self._world.is_main and past_s >= every_s

    @property
    def has_unreported_save(self) -> bool:
        """Whether the last save is complete, and the other ranks don't know this yet. They also
        learn from it that the next save doesn't have to wait for the writer."""
        if self._started == self._confirmed or not self._world.is_main or self._job is None:
            return False
        return self._job.is_published and self._job.error is None and self.in_flight is None

    @property
    def in_flight(self) -> int | None:
        """The step that this rank's writer is saving; None if it is idle."""
        writing, job = self._writing, self._job
        return None if writing is None or job is None or writing.done() else job.step

    @property
    def failure(self) -> str | None:
        """Why the last save of this rank failed, or None."""
        if self._job is None or self._job.error is None:
            return None
        error = self._job.error
        kind = "" if isinstance(error, OSError | TrainerError) else f"{type(error).__name__}: "
        return f"step {self._job.step} was not saved: {kind}{error}"

    @property
    def fatal(self) -> TrainerError | None:
        """Why this rank's saves must end the run: one or its upload has failed and
        --checkpoint.on-error is stop, or another start has taken over the mirror."""
        if self._mirror is not None and self._mirror.error is not None:
            return self._mirror.error
        why = self.failure or (self._mirror and self._mirror.failure)
        return SaveFailed(why) if why and self._config.on_error == "stop" else None

    def save(self, kind: str) -> None:
        """Collective. Save the state of this step boundary; repeated calls save it once. Raises
        OSError if the previous save failed, with --checkpoint.on-error stop."""
        self._started_s, progress = time.monotonic(), self._state.progress
        self._marks.mark(Phase.SAVE, progress.step)
        boundary = (progress.step, progress.validated)
        # A stop or a survivor may have saved this step before its validation was complete.
        if boundary != self._started:
            if self._started == self._confirmed and not self._world.has_nodes:
                self._finish_previous(kind)
            else:  # it may take longer than a rank may wait in a step
                self._world.fail_together(partial(self._finish_previous, kind))
            self._started, self._started_kind = boundary, kind
            self._state.share()
            self._start()
        self.blocked_s += time.monotonic() - self._started_s

    def _finish_previous(self, kind: str) -> None:
        """Wait for the last save, and before one of this kind repeat a failed one of best weights.
        """
        self.finish_pending()
        self._repeat_best(kind)

    def _repeat_best(self, kind: str) -> None:
        if self._world.writes_run_dir and kind != "best" and self._unconfirmed_best is not None:
            self._submit(self._unconfirmed_best)  # the next copy overwrites its tensors
            self.finish_pending()

    def _start(self) -> None:
        """Copy the state and start writing it, unless best weights have to be saved before."""
        is_best, writes = self._started_kind == "best", self._world.writes_run_dir
        if not is_best and (not writes or self._unconfirmed_best is not None):
            return
        has_copy = writes or self._world.rank == 1
        copy = self._boundary.copy(self._state.tensors()) if has_copy else {}
        job = self._make_job(self._started_kind, copy)
        if is_best:
            self._unconfirmed_best = job
        if writes:
            self._submit(job)

    def allocate(self) -> None:
        """Make the memory for the copies of a GPU's state now: it would hold up the first save."""
        if self._world.writes_run_dir:
            self._boundary.snapshot.allocate(self._state.tensors() | {
                OPTIMIZER: self._state.expected_optimizer_tensors()})

    def settle(self) -> None:
        """Collective. Wait until the last save is durable; if it failed, save again, on a full disk
        for up to `files.DISK_FULL_WAIT_S`. Raises OSError or RuntimeError on all ranks if that has
        failed too."""
        self._world.fail_together(self._finish_or_retry)
        self.confirm()

    def _finish_or_retry(self) -> None:
        try:
            self.finish_pending(must=True)
        except OSError:
            with waiting_for(WaitsFor.WRITER):
                files.when_not_full(self._save_again, self._log.warning)

    def _save_again(self) -> None:
        self._repeat_best(self._started_kind)
        self._start()
        self.finish_pending(must=True)

    def confirm(self) -> int:
        """Mark the last save as durable (confirmed by rank 0). Returns its step."""
        self._unconfirmed_best, self._confirmed = None, self._started
        return self._started[0]

    def finish_pending(self, *, must: bool = False) -> None:
        """Wait for the save in progress, if any, and report its failure: by an OSError with `must`
        or --checkpoint.on-error stop."""
        job, writing = self._job, self._writing
        if writing is not None:
            self.waits += not must and not writing.done()
            self.abandon()
            self._writing = None
        if job is None:
            return
        if job.error is None:
            if job is self._unconfirmed_best:
                self._unconfirmed_best = None
            if self._has_failed:
                self._log.info(f"step {job.step} is saved, after failed saves")
            self._has_failed = False
            return
        tolerated = (CheckpointDamaged,) if must else (CheckpointDamaged, NonFinite)
        if isinstance(job.error, TrainerError) and not isinstance(job.error, tolerated):
            raise job.error
        if writing is not None:
            self._log.event("save-failed", at_step=job.step, why=str(job.error))
        had_failed, self._has_failed = self._has_failed, True
        if must or self._config.on_error == "stop":
            raise OSError(self.failure) from job.error
        if not had_failed:
            self._log.warning(
                f"{self.failure}. The run continues and tries again at the next save.")

    def save_alone(self, kept: Mapping[int, Tensor] | None = None) -> int | None:
        """Save this step boundary after the death of another rank. Every survivor tries; one of
        them writes, and the others find its checkpoint.

        Args:
            kept: address → tensor to save in place of the live one, if this is not the main thread.

        Returns:
            The step saved; None if a checkpoint of this step exists already.
        """
        self.abandon()
        with contextlib.suppress(OSError):
            self._record.metrics.sync()  # for the folder of another node
        best = self._unconfirmed_best
        if best is not None and not self.store.holds(best.step, self.generation):
            if not best.tensors:
                raise CheckpointBusy(f"the best weights, of step {best.step}, are not on disk, and "
                                     "only rank 1 has a copy of them")
            self._write_alone(best)
        step = self._state.progress.step
        if self.store.holds(step, self.generation):
            return None
        tensors = self._state.tensors()
        if kept:
            tensors = {file: {name: kept.get(t.data_ptr(), t) for name, t in entries.items()}
                       for file, entries in tensors.items()}
        # Pinning would wait for a stuck kernel.
        copy = self._boundary.snapshot.take(tensors, pin=False)
        self._write_alone(self._make_job("survivor", copy))
        return step

    def _write_alone(self, job: SaveJob) -> None:
        wait_s = SURVIVORS_WAIT * self._world.launch.grace_s
        with self.store.stage(job.step, generation=self.generation, wait_s=wait_s) as stage:
            if not self.store.holds(job.step, self.generation):
                self._write_files(stage, job)
        self._offer(job)

    def _make_job(self, kind: str, tensors: dict[str, dict[str, Tensor]]) -> SaveJob:
        step = self._state.progress.step
        facts = {**self._state.facts(), **self._record.attempt,
                 **self._record.metrics.state_dict(), "step": step, "generation": self.generation}
        if not self._state.progress.consecutive_bad_steps:
            self._last_good_step = step
        kept = {self._state.best.step, self._last_good_step, *self._state.cycle_ends}
        return SaveJob(step, kind, tensors, facts, kept)

    def _submit(self, job: SaveJob) -> None:
        job.error, self._job = None, job
        self._writing = self._writer.submit(self._write, job)
        self._writing.add_done_callback(lambda _: self._marks.writer_is_idle())

    def _write(self, job: SaveJob) -> None:
        began = time.perf_counter()
        total = sum(map(tensorfile.data_size, job.tensors.values()))
        try:
            with self.store.stage(job.step, generation=self.generation,
                                  expected_bytes=total) as stage:
                with contextlib.suppress(OSError):  # the checkpoint contains them too
                    self._record.metrics.sync()
                self._write_files(stage, job)
        except BaseException as error:
            job.error = error  # reported by the main thread at the next boundary
            return
        job.is_published = True
        self._offer(job)
        try:
            self._verify_restored_best(job)
            if job.error is None:
                self.store.prune(protect=job.protect | (
                    set() if self._mirror is None else self._mirror.in_use))
        except (OSError, TrainerError) as error:
            self._log.warning(f"older checkpoints could not be deleted: {error}")
        self._log.event("save", at_step=job.step, kind=job.kind, bytes=total,
                        seconds=round(time.perf_counter() - began, 6))

    def _offer(self, job: SaveJob) -> None:
        """Offer a save that is on disk to the mirror."""
        if self._mirror is not None:
            self._mirror.offer(job.step, always=job.kind != "periodic"
                               or job.step in self._state.cycle_ends)

    def _verify_restored_best(self, job: SaveJob) -> None:
        """Verify the best weights of an earlier attempt before older checkpoints are pruned; at the
        start this would delay the first step. If they are damaged, this attempt ends, and the next
        one resumes from before them."""
        step, self._unverified_best = self._unverified_best, 0
        if step in job.protect and not self._world.has_nodes:
            job.error = self._hide_damaged_best(step)

    def end_for_damaged_best(self, step: int) -> None:
        """Collective. Raise SaveFailed if the checkpoint of the best weights is damaged, and an
        older one is left from which the next start can compute them again."""
        self._world.raise_on_all_ranks(
            self._hide_damaged_best(step) if self._world.writes_run_dir else None)

    def _hide_damaged_best(self, step: int) -> SaveFailed | None:
        before = self.store.hide_damaged(step)
        return None if before is None else SaveFailed(
            f"the best weights, of step {step}, are damaged. The next start continues from step "
            f"{before} and computes them again")

    def _write_files(self, stage: StagedCheckpoint, job: SaveJob) -> None:
        self._boundary.snapshot.wait()  # `take` may have been called again only after this job
        if names := self._state.nonfinite_parameters(job.tensors[MODEL]):
            raise NonFinite(f"step {job.step} has NaN or infinite weights ({', '.join(names)}); "
                            "such a checkpoint is never kept")
        for name, tensors in job.tensors.items():
            stage.write(name, tensorfile.serialize(tensors))
        facts = {**job.facts, "rng": self._state.rng_digests(job.step)}
        stage.write(STATE, json.dumps(facts).encode())
        stage.commit(kind=job.kind, run=self._record.run_id)

    def load(self, found: CheckpointRef) -> None:
        """Collective. Load a checkpoint into the live tensors of all ranks."""
        restore_state(found, self.store, self._state, self._world, self._log)
        self.generation = max(abandon_newer(found, self.store, self._world, self._log),
                              self._record.generation)
        now = self._state.progress
        self._started = self._confirmed = (
            NOTHING if found.path else (now.step, now.validated))
        self._last_good_step = -1 if now.consecutive_bad_steps else now.step
        self._unverified_best = 0 if found.path else self._state.best.step

    def go_back(self, found: CheckpointRef) -> None:
        """Collective. Roll back to an older checkpoint, in a new generation."""
        restore_state(found, self.store, self._state, self._world, self._log)
        self.generation = max(found.generation, self.generation) + 1
        if self._world.writes_run_dir:
            self.store.set_aside(after_step=found.step, generation=self.generation)
        self._world.barrier()  # no rank saves in the new generation before this
        self._started = self._confirmed = NOTHING

    def load_model(self, step: int) -> bool:
        """Collective. See `restore_model`."""
        self.finish_pending()
        return restore_model(step, self.store, self._state, self._world)

    def close(self) -> None:
        """As `finish_pending`, then stop the writer."""
        self.finish_pending(must=True)
        self._writer.shutdown()
        self.store.close()

    def abandon(self) -> None:
        """Wait for the save in progress, without reporting its result."""
        if self._writing is not None:
            with waiting_for(WaitsFor.WRITER):
                self._writing.result()
