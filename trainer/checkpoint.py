"""When the state is saved, how it gets to disk beside the training, and how it comes back."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from trainer import tensorfile
from trainer.errors import CheckpointDamaged, NonFinite, TrainerError
from trainer.job import Job
from trainer.log import Log
from trainer.manifest import Stage
from trainer.pulse import ProgressMarks
from trainer.restore import abandon_newer, restore, restore_model
from trainer.snapshot import Snapshot
from trainer.source import STATE, Found
from trainer.state import MODEL, TrainState
from trainer.status import Phase
from trainer.store import Store
from trainer.waits import WaitsFor, waiting_for
from trainer.world import World

SURVIVORS_WAIT = 2 / 3
"""The part of what the launcher gives that a survivor waits for another one's save."""


class Checkpointer:
    """Saves at step boundaries: a copy in memory, then written by a thread of its own on each
    rank that keeps a folder (rank 0; the first of each node with a disk of its own).

    Args:
        describe: what else a checkpoint remembers of this attempt (settings, circumstances).
        recent: the metric lines since the last committed checkpoint; travel in each save.
        sync: makes the lines written so far durable; called before a commit.
        marks: progress marks of this rank; learn when a save begins and when the writer is idle.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, store: Store, state: TrainState, world: World, log: Log, run_id: str,
        describe: Mapping[str, Any], recent: list[Any], on_error: str,
        every_s: float = 0.0, sync: Callable[[], None] = lambda: None,
        marks: ProgressMarks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.store = store
        self.generation = 0
        self.waits = 0
        """Saves that had to wait for the one before."""
        self.held_s = 0.0
        """How long `save` has held up the training."""
        self.overlap = False
        """Whether nothing but an update moves parameters, so that they may be copied during the
        next forward and backward."""
        self.failed: str | None = None
        """Why the last save failed, until one succeeds."""
        self._state, self._world, self._log, self._run_id = state, world, log, run_id
        self._describe, self._recent, self._on_error = dict(describe), recent, on_error
        self._clock, self._every_s = clock, every_s
        self._last_s = clock()
        self._snapshot = Snapshot()
        # One thread for all saves: to wake it costs the training 10 µs, to start it 100-200.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._writing: Future[None] | None = None
        self._job: Job | None = None
        self._saved, self._kind = (-1, -1), ""  # step, and the last validated step that it holds
        self._known = self._saved  # the save that all ranks know to be whole
        self._healthy = -1  # the newest save that no bad step came directly before
        self._held: Job | None = None  # the best weights, on every rank, until they are on disk
        self._sync, self._marks = sync, marks or ProgressMarks()

    @property
    def overdue(self) -> bool:
        """Whether a save by the clock is due; rank 0's clock counts for all."""
        return bool(self._every_s) and self._world.is_main and (
            self._clock() - self._last_s >= self._every_s)

    @property
    def has_news(self) -> bool:
        """Whether the last save of this rank is whole on disk, and not all ranks know."""
        job = self._job
        return self._saved is not self._known and self.saved_step >= 0 and self._world.is_main and (
            self.failed is None if job is None else job.done and job.error is None)

    @property
    def in_flight(self) -> int | None:
        """The step that this rank's writer is at; None if it has nothing to do."""
        writing, job = self._writing, self._job
        return None if writing is None or job is None or writing.done() else job.step

    @property
    def saved_step(self) -> int:
        """The step of the last save that was begun."""
        return self._saved[0]

    @property
    def must_fail(self) -> bool:
        """Whether a save has failed on this rank and the run is to end for it."""
        return self._on_error == "stop" and self.failure is not None

    @property
    def failure(self) -> str | None:
        """Why the last save of this rank failed, if it did."""
        job = self._job
        return self.failed if job is None or job.error is None else job.told

    def save(self, kind: str) -> None:
        """Collective. Save the state of this step boundary; several triggers on one step make one.

        Args:
            kind: periodic, best, stop: why.

        Raises:
            OSError: with --checkpoint.on-error stop: the one before couldn't be written.
        """
        self._last_s = self._clock()
        self._marks.mark(Phase.SAVE, self._state.progress.step)
        self._save(kind)
        self.held_s += self._clock() - self._last_s

    def _save(self, kind: str) -> None:
        progress = self._state.progress
        boundary = (progress.step, progress.validated)
        # A stop or a survivor may have saved the step before its validation was done.
        if boundary == self._saved:
            return
        self.finish_pending()
        self._saved, self._kind = boundary, kind
        self._state.share()
        self._begin(kind)

    def _begin(self, kind: str) -> None:
        """Copy this boundary's state and have it written, after best weights that still wait."""
        best, keeps = kind == "best", self._world.keeps_folder
        if keeps and self._held is not None and not best:
            # Best weights whose save has failed; their copy is what the next one would overwrite.
            self._submit(self._held)
            self.finish_pending()
            if self._held is not None:
                return
        if keeps or best:
            live = self._state.tensors()
            later = self._state.still(live) if self.overlap and keeps else ()
            job = self._take(kind, self._snapshot.take(live, later=later))
            if best:
                self._held = job  # a survivor must be able to write what the state calls the best
            if keeps:
                self._submit(job)

    def settle(self) -> None:
        """Collective. Wait until the last save is durable. One that has failed is tried once more:
        the state is still that one.

        Raises:
            OSError, RuntimeError: it couldn't be written; on all ranks.
        """
        error: Exception | None = None
        for again in (False, True):
            try:
                if again:
                    self._begin(self._kind)
                self.finish_pending(must=True)
                error = None
            except Exception as problem:
                error = problem
            if not (isinstance(error, OSError) and self._world.keeps_folder):
                break
        self._world.agree(error)
        self.forget()

    def forget(self) -> None:
        """The last save is whole on disk, rank 0 says."""
        self._held, self._known = None, self._saved

    def finish_copy(self) -> None:
        """Wait until the copy of the last save is complete: before an update."""
        if self._job is not None and not self._job.copied.is_set():
            with waiting_for(WaitsFor.WRITER):
                self._job.copied.wait()

    def finish_pending(self, *, must: bool = False) -> None:
        """Wait for the save in flight, if any, and report a failure.

        Raises:
            OSError: it failed, and `must` or --checkpoint.on-error stop.
        """
        if self._writing is None or self._job is None:
            if must and self.failed is not None:
                raise OSError(self.failed)
            return
        if not self._writing.done() and not must:
            self.waits += 1
        with waiting_for(WaitsFor.WRITER):
            self._writing.result()
        job, self._job, self._writing = self._job, None, None
        if job.error is None:
            if job is self._held:
                self._held = None
            if self.failed is not None:
                self._log.info(f"step {job.step} is saved again, after failures")
            self.failed = None
            return
        kept_on = (CheckpointDamaged,) if must else (CheckpointDamaged, NonFinite)
        if isinstance(job.error, TrainerError) and not isinstance(job.error, kept_on):
            raise job.error
        said, self.failed = self.failed, job.told
        self._log.event("save-failed", at_step=job.step, why=str(job.error))
        if must or self._on_error == "stop":
            raise OSError(self.failed) from job.error
        if said is None:  # once, until a save succeeds again
            self._log.warning(f"{self.failed}. The run goes on and tries again at the next save.")

    def save_alone(self, kept: Mapping[int, Tensor] | None = None) -> int | None:
        """Save the state of this step boundary without the other ranks, one of which is dead.

        Every survivor tries; one writes, the others find its checkpoint whole.

        Args:
            kept: address → the tensor to save in place of the live one there, where another
                thread than the main one saves, beside whatever the device is at.

        Returns:
            The step that is saved now; None where an equally new checkpoint was there already.

        Raises:
            OSError, CheckpointBusy, StaleAttempt: it couldn't be written.
        """
        self.abandon()
        with contextlib.suppress(OSError):
            self._sync()  # of a folder that rank 0 doesn't keep, nobody says when it is durable
        if self._held is not None and not self.store.holds(self._held.step, self.generation):
            self._write_alone(self._held)
        step = self._state.progress.step
        if self.store.holds(step, self.generation):
            return None
        tensors = self._state.tensors()
        if kept:
            tensors = {file: {name: kept.get(t.data_ptr(), t) for name, t in entries.items()}
                       for file, entries in tensors.items()}
        copy = self._snapshot.take(tensors, pin=kept is None)
        self._write_alone(self._take("survivor", copy))
        return step

    def _write_alone(self, job: Job) -> None:
        with self.store.stage(
            job.step, generation=self.generation, wait_s=SURVIVORS_WAIT * self._world.launch.grace_s
        ) as stage:
            if not self.store.holds(job.step, self.generation):
                self._fill(stage, job)

    def _take(self, kind: str, tensors: dict[str, dict[str, Tensor]]) -> Job:
        """What a checkpoint of this step boundary is to hold."""
        step = self._state.progress.step
        facts = {
            **self._state.facts(), **self._describe,
            "lines": list(self._recent), "step": step, "generation": self.generation,
        }
        if not self._state.progress.bad_row:
            self._healthy = step
        return Job(step, kind, tensors, facts, {self._state.best.step, self._healthy})

    def _submit(self, job: Job) -> None:
        job.error, self._job = None, job
        self._writing = self._writer.submit(self._write, job)
        self._writing.add_done_callback(lambda _: self._marks.writer_is_idle())

    def _write(self, job: Job) -> None:
        began = time.perf_counter()
        try:
            self._finish_snapshot(job)
            total = sum(tensorfile.size(t) for t in job.tensors.values())
            with self.store.stage(
                job.step, generation=self.generation, expected_bytes=total
            ) as stage:
                with contextlib.suppress(OSError):  # lines that wait travel in the checkpoint
                    self._sync()
                self._fill(stage, job)
        except BaseException as error:
            job.error = error  # reported by the main thread at the next boundary
            return
        job.done = True
        try:
            self.store.prune(protect=job.protect)
        except (OSError, TrainerError) as error:
            self._log.warning(f"older checkpoints could not be removed: {error}")
        self._log.event("save", at_step=job.step, kind=job.kind, bytes=total,
                        seconds=round(time.perf_counter() - began, 6))

    def _finish_snapshot(self, job: Job) -> None:
        try:
            if not self._snapshot.finish():
                self.overlap = False
                if job is self._held:
                    self._held = None  # nobody may write this copy
                raise CheckpointDamaged("a forward changed parameters while they were copied; "
                                        "from now on they are copied before")
        finally:
            job.copied.set()

    def _fill(self, stage: Stage, job: Job) -> None:
        if sick := self._state.sick(job.tensors[MODEL]):
            raise NonFinite(f"step {job.step} has weights that aren't finite ({', '.join(sick)}): "
                            "such a checkpoint is never kept")
        for name, tensors in job.tensors.items():
            stage.write(name, tensorfile.chunks(tensors))
        facts = {**job.facts, "rng": self._state.rng_digests(job.step)}
        stage.write(STATE, json.dumps(facts).encode())
        stage.commit(kind=job.kind, run=self._run_id)

    def load(self, found: Found) -> None:
        """Collective. Bring a checkpoint's state to all ranks, into the storage in use."""
        restore(found, self.store, self._state, self._world, self._log)
        self.generation = abandon_newer(found, self.store, self._world, self._log)
        now = self._state.progress
        self._saved = self._known = (-1, -1) if found.path else (now.step, now.validated)
        self._healthy = -1 if now.bad_row else now.step

    def go_back(self, found: Found) -> None:
        """Collective. Bring back an older checkpoint's state in mid-run, and abandon what is
        newer: the run goes on in a new generation."""
        restore(found, self.store, self._state, self._world, self._log)
        self.generation = max(found.generation, self.generation) + 1
        if self._world.keeps_folder:
            self.store.set_aside(after_step=found.step, generation=self.generation)
        self._world.barrier()  # nobody saves in the new generation before
        self._saved = (-1, -1)

    def load_model(self, step: int) -> bool:
        """Collective. The weights of a checkpoint, into the model on all ranks; whether there is
        a whole one."""
        self.finish_pending()
        return restore_model(step, self.store, self._state, self._world)

    def close(self) -> None:
        """Wait for the last save.

        Raises:
            OSError: the newest state couldn't be saved.
        """
        self.finish_pending(must=True)
        self._writer.shutdown()
        self.store.close()

    def abandon(self) -> None:
        """After a failure: let the save in flight come to its end; it may be whole."""
        if self._writing is not None:
            with waiting_for(WaitsFor.WRITER):
                self._writing.result()
