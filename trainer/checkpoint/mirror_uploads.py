"""Upload checkpoints to the mirror in a thread beside the training.

At most one upload is in progress and one waits: a newer save takes the place of the one that waits.
A failure is repeated after a pause, and no step ever waits for the network. After each upload the
thread rests, so that uploads take at most a small share of the processor time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.mirror import Mirror, total_bytes
from trainer.checkpoint.mirror_fence import Fence
from trainer.checkpoint.mirror_writer import MirrorPolicy, MirrorWriter
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.distributed.device import share_of_cores
from trainer.errors import CheckpointDamaged, MirrorTaken
from trainer.storage.object_store import StoreError
from trainer.telemetry.events import Log

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed upload; doubled up to the longest one."""
SHARE, THREADS = 0.005, 2.0
"""Part of the processor time of this process's cores that uploads may take: they are followed by a
rest. Processor time of an upload in all threads, obstore's too, per second of it in this one."""
END_LIMIT_S = 300.0
"""Seconds for which uploads may fail in a row at the end of a run, before it ends without them."""


@dataclass(frozen=True)
class _Upload:
    step: int
    since_s: float
    is_product: bool = False


class _Abandoned(Exception):
    """The upload makes place for a newer one."""


class MirrorUploads:
    """The uploads of one attempt; on rank 0 only. `start` begins the thread, after the fence has
    been taken.

    Args:
        folder: the run folder; `local` is its checkpoint folder.
        bytes_per_s: speed of earlier uploads, if known.
    """

    def __init__(
        self, mirror: Mirror, local: Store, folder: Path, policy: MirrorPolicy, *, log: Log,
        bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.fence = Fence(mirror)
        self.writer = MirrorWriter(self.fence, local, folder, policy, log=log,
                                   on_chunk=self._on_chunk)
        self.error: MirrorTaken | None = None
        """Set when another start has taken over; the thread has ended then."""
        self.failure: str | None = None
        """Why the last upload failed, until one succeeds."""
        self.bytes_per_s, self.lag_s = bytes_per_s, 0.0
        """Speed of the last upload, and seconds from its save until it was in the mirror."""
        self._local, self._every, self._log, self._clock = local, policy.every, log, clock
        self._changed = threading.Condition()
        self._active: _Upload | None = None
        self._waiting: _Upload | None = None
        self._active_bytes = 0  # of the active one, so far
        self._failing_since_s: float | None = None
        self._abandons_active = self._is_last = self._is_closed = False
        self._offered = 0  # step of the last save that was due
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    # --- called by other threads

    def start(self) -> None:
        self._thread.start()

    def offer(self, step: int, *, always: bool) -> None:
        """Upload the local checkpoint of a step if it is due, or `always`."""
        every = self._every
        if always or every is None or (every and step // every != self._offered // every):
            self._offered = step
            self._enqueue(_Upload(step, self._clock()))

    def offer_product(self, step: int) -> None:
        """Upload the checkpoint of the last step, if it is missing, and then the product."""
        self._enqueue(_Upload(step, self._clock(), is_product=True))

    def _enqueue(self, upload: _Upload) -> None:
        with self._changed:
            self._waiting = upload
            self._changed.notify_all()

    @property
    def in_use(self) -> set[int]:
        """Steps whose local checkpoints are still to be read."""
        with self._changed:
            return {upload.step for upload in (self._active, self._waiting) if upload is not None}

    def figures(self) -> dict[str, float]:
        """The figures of the last upload, for TensorBoard."""
        return {} if not self.lag_s else {
            "mirror/mb_per_s": (self.bytes_per_s or 0.0) / 1e6, "mirror/lag_s": self.lag_s}

    def behind(self) -> str:
        """How far the mirror is behind, while a save waits for an earlier one or uploads fail."""
        with self._changed:
            oldest = self._active or self._waiting
            if oldest is None or (self.failure is None and None in (self._active, self._waiting)):
                return ""
            return f"mirror {self._clock() - oldest.since_s:.0f} s behind"

    def drain(self, left_s: Callable[[], float]) -> bool:
        """Wait until all is uploaded, while `left_s()` is positive, and say if it won't be. Returns
        whether all is uploaded."""
        with self._changed:
            last = self._waiting or self._active
            if last is None or self.error is not None:
                return last is None
            self._forecast(last, left_s())
            self._is_last, began_s = True, self._clock()
            self._changed.notify_all()
            while self._waiting is not None or self._active is not None:
                now_s = self._clock()
                failing_s = now_s - max(self._failing_since_s or now_s, began_s)
                if left_s() <= 0 or failing_s > END_LIMIT_S or not self._thread.is_alive():
                    break
                self._changed.wait(0.1)
            if self.error is not None or (self._waiting is None and self._active is None):
                return self.error is None
        why = self.failure or "the time was too short"
        self._log.event("mirror-left-out", at_step=last.step, why=why)
        self._log.warning(f"step {last.step} is not in the mirror: {why}. It is on this disk; the "
                          "next start that has the disk uploads it")
        return False

    def close(self) -> None:
        """End the thread; an upload in progress is abandoned."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _forecast(self, last: _Upload, left_s: float) -> None:
        """Say whether the last upload fits into the time that is left. If it does only without the
        one in progress, abandon that one. The caller holds the lock."""
        size, ahead = self._size(last.step), 0
        if self._active is not None and self._waiting is not None:
            ahead = max(0, self._size(self._active.step) - self._active_bytes)
        text = f"uploading step {last.step} to the mirror: {size / 1e6:.3g} MB"
        if self.bytes_per_s is None or left_s == math.inf:
            self._abandons_active = ahead > 0 and left_s < math.inf
            self._log.info(text)
            return
        needed_s, before_s = size / self.bytes_per_s, ahead / self.bytes_per_s
        self._abandons_active = before_s > 0 and needed_s <= left_s < needed_s + before_s
        text += (f" take about {needed_s:.0f} s at {self.bytes_per_s / 1e6:.3g} MB/s, "
                 f"{left_s:.0f} s are left")
        (self._log.info if needed_s <= left_s else self._log.warning)(text)

    def _size(self, step: int) -> int:
        try:
            return total_bytes(self._local.find(step).manifest)
        except CheckpointDamaged:
            return 0

    # --- the thread

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        cores = share_of_cores(1)
        while (upload := self._next()) is not None:
            began_s = time.thread_time()
            try:
                self._upload(upload)
            except MirrorTaken as error:
                self.error = error
                self._log.event("mirror-taken", why=str(error))
                self._done()
                return
            except _Abandoned:
                self._done()
            except CheckpointDamaged as error:  # the local one
                self._log.warning(f"step {upload.step} is not uploaded: {error}")
                self._done()
            except Exception as error:
                kind = "" if isinstance(error, StoreError) else f"{type(error).__name__}: "
                self._fail(upload, f"{kind}{error}", pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._succeed()
                pause_s = FIRST_PAUSE_S
                self._rest(THREADS * (time.thread_time() - began_s) / (SHARE * cores))

    def _rest(self, seconds: float) -> None:
        """Wait, but not at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_last or self._is_closed, seconds)

    def _next(self) -> _Upload | None:
        """The next upload; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            if self._is_closed:
                return None
            self._active, self._waiting = self._waiting, None
            self._active_bytes, self._abandons_active = 0, False
            return self._active

    def _upload(self, upload: _Upload) -> None:
        """Upload a checkpoint, after that of the best weights until then; verify it, and prune."""
        best = SavedState.read(self._local.find(upload.step).path).best.step
        if best not in (0, upload.step) and self._local.checksum(best):
            self._upload_checkpoint(best, upload)
        uploaded = self._upload_checkpoint(upload.step, upload)
        if upload.is_product:
            self.writer.upload_product(upload.step)
            self._log.event("mirror", at_step=upload.step, product=True)
        elif self._is_last:
            return  # the process is to end soon
        if uploaded:
            self.writer.prune()

    def _upload_checkpoint(self, step: int, upload: _Upload) -> bool:
        """Upload and verify the checkpoint of a step unless it is in the mirror."""
        began_s = self._clock()
        entry = self.writer.upload(step)
        if entry is None:
            return False
        size, seconds = self._size(step), self._clock() - began_s
        self.bytes_per_s, self.lag_s = size / max(seconds, 1e-6), self._clock() - upload.since_s
        self._log.event("mirror", at_step=step, generation=entry.generation, bytes=size,
                        seconds=round(seconds, 6), mb_per_s=round(self.bytes_per_s / 1e6, 3),
                        lag_s=round(self.lag_s, 6))
        if upload.is_product or not self._is_last:
            self.writer.verify(entry)
        return True

    def _on_chunk(self, chunk: memoryview) -> None:
        if self._abandons_active or self._is_closed:
            raise _Abandoned
        self._active_bytes += len(chunk)

    def _done(self) -> None:
        with self._changed:
            self._active = None
            self._changed.notify_all()

    def _succeed(self) -> None:
        if self.failure is not None:
            self._log.info("the mirror can be reached again")
        self.failure = self._failing_since_s = None
        self._done()

    def _fail(self, upload: _Upload, why: str, pause_s: float) -> None:
        """Record a failed upload, and repeat it after a pause unless there is a newer one."""
        if self.failure is None:
            self._failing_since_s = self._clock()
            self._log.warning(f"step {upload.step} could not be uploaded to the mirror: {why}. The "
                              "training goes on, and the upload is repeated")
        self._log.event("mirror-failed", at_step=upload.step, why=why)
        with self._changed:
            self.failure = why
            self._waiting, self._active = self._waiting or upload, None
            self._changed.notify_all()
        self._rest(pause_s)  # a newer save doesn't shorten it
        with self._changed:  # the end of the run does
            self._changed.wait_for(lambda: self._is_closed, FIRST_PAUSE_S * self._is_last)
