"""Upload the checkpoints of a run to its mirror, in a thread beside the training.

The fence: each start raises the generation in the object `owner` by a conditional PUT, and saves
its checkpoints, local ones too, in that generation; a rollback raises it again. So a writer that
another start has superseded can commit in an older generation at most, which no reader prefers. It
deletes nothing, since it reads `owner` before each deletion.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.checkpoint.manifest import encode_manifest
from trainer.checkpoint.mirror import (
    CHECKPOINTS,
    DATA,
    DOCUMENTS,
    FINISHED,
    LINES,
    OWNER,
    RECORDS,
    Mirror,
    MirrorEntry,
    Owner,
    record_key,
    total_bytes,
)
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged, ConfigError, MirrorTaken
from trainer.storage import layout
from trainer.storage.object_store import AccessDenied, Conflict, StoreError, Version
from trainer.storage.open_uploads import abort_open_uploads
from trainer.telemetry.events import Log

RECORD_BYTES = 4 << 20
"""Size of the parts of a record: the full ones are uploaded once, the last one with each save."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed upload; doubled up to the longest one."""
END_LIMIT_S = 300.0
"""Seconds for which uploads may fail in a row at the end of a run, before it ends without them."""
_OTHER: Version = {"e_tag": '"00000000000000000000000000000000"', "version": "1"}


@dataclass(frozen=True, kw_only=True)
class MirrorPolicy:
    """Which saves are uploaded, and which of them are kept."""

    every: int | None = None
    """Upload one periodic save per this many steps; None: each one, 0: none."""
    keep: int = 3
    keep_every: int | None = None
    """See `Store`."""


@dataclass(frozen=True)
class _Upload:
    step: int
    since_s: float
    is_product: bool = False


class _Abandoned(Exception):
    """The upload makes place for a newer one."""


class MirrorWriter:
    """Writes the mirror of one attempt; on rank 0 only. `start` begins the thread.

    Args:
        folder: the run folder; `local` is its checkpoint folder.
        owner: what this attempt writes to the object `owner`; None before `take`.
        bytes_per_s: speed of earlier uploads, if known.
    """

    def __init__(
        self, mirror: Mirror, local: Store, folder: Path, policy: MirrorPolicy, *, log: Log,
        bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.mirror, self.owner = mirror, Owner(run="", generation=0, nonce="")
        self.error: MirrorTaken | None = None
        """Set when another start has taken over."""
        self.failure: str | None = None
        """Why the last upload failed, until one succeeds."""
        self.lag_s: float | None = None
        """Seconds from the last mirrored save until it was in the mirror."""
        self.bytes_per_s = bytes_per_s
        self._local, self._folder, self._policy = local, folder, policy
        self._log, self._clock = log, clock
        self._changed = threading.Condition()
        self._waiting: _Upload | None = None
        self._active: _Upload | None = None
        self._failing_since_s: float | None = None
        self._leave_out_active = self._is_last = False
        self._owns = self._is_closed = False
        self._offered = 0  # step of the last save that was offered
        self._active_bytes = 0
        self._manifests: dict[MirrorEntry, dict[str, Any]] | None = None  # None: not listed yet
        self._records: set[str] = set()
        self._may_delete = True
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    # --- the fence

    def take(self, owner: Owner) -> None:
        """Become the owner of the mirror, and check that the store refuses writes whose condition
        doesn't hold. Raises MirrorTaken if another start has this generation or a later one, or is
        faster; ConfigError if the store ignores conditions; StoreError."""
        self.owner = owner
        found = self.mirror.owner()
        if found is not None and found[0] != owner and found[0].generation >= owner.generation:
            raise self._taken(found[0])
        self._swap(owner, None if found is None else found[1])
        store, data = self.mirror.store, owner.encode()
        for write in (lambda: store.put_new(OWNER, data),
                      lambda: store.replace(OWNER, data, _OTHER)):
            try:
                write()
            except Conflict:
                continue
            raise ConfigError(
                f"--checkpoint.mirror {store.url}: this store ignores the conditions of a write "
                "(If-None-Match, If-Match), so two starts could overwrite each other's "
                "checkpoints. Use a store with conditional writes (S3, GCS, Azure, MinIO, Ceph).")
        self._owns = True

    def _swap(self, owner: Owner, seen: Version | None) -> None:
        store, data = self.mirror.store, owner.encode()
        try:
            if seen is None:
                store.put_new(OWNER, data)
            else:
                store.replace(OWNER, data, seen)
        except Conflict:
            now = self.mirror.owner()
            if now is None or now[0] != owner:  # else the answer to a first try was lost
                raise self._taken(None if now is None else now[0]) from None
        self.owner = owner

    def _check_owner(self) -> Version:
        """Raise MirrorTaken unless this attempt is still the owner."""
        found = self.mirror.owner()
        if found is None or found[0] != self.owner:
            raise self._taken(None if found is None else found[0])
        return found[1]

    def _taken(self, by: Owner | None) -> MirrorTaken:
        who = "another program has removed its owner" if by is None else (
            f"another start of the run (attempt {by.attempt} on {by.host}, generation "
            f"{by.generation}) has taken it over")
        return MirrorTaken(
            f"--checkpoint.mirror {self.mirror.store.url}: {who}. This attempt ends: only one may "
            "continue the run. Stop the other one before you start it here again.")

    # --- called by other threads

    def start(self) -> None:
        self._thread.start()

    def offer(self, step: int, *, always: bool) -> None:
        """Upload the local checkpoint of a step when the upload in progress is done, in place of
        one that still waits; `always`: whatever the interval."""
        every = self._policy.every
        due = every is None or (every and step // every != self._offered // every)
        if always or due:
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
        """The speed of the last upload and how late it was, for TensorBoard."""
        return {} if self.lag_s is None else {
            "mirror/mb_per_s": (self.bytes_per_s or 0.0) / 1e6, "mirror/lag_s": self.lag_s}

    def behind(self) -> str:
        """How far the mirror is behind, while a save waits for an earlier one or uploads fail."""
        with self._changed:
            oldest = self._active or self._waiting
            if oldest is None or (self._waiting is None and self.failure is None):
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
            self._is_last = True
            self._changed.notify_all()
            while self._waiting is not None or self._active is not None:
                failing_s = self._clock() - (self._failing_since_s or self._clock())
                if left_s() <= 0 or failing_s > END_LIMIT_S or not self._thread.is_alive():
                    break
                self._changed.wait(0.1)
            else:
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
        size = self._size(last.step)
        if self.bytes_per_s is None or left_s == math.inf:
            self._leave_out_active = left_s < math.inf and None not in (
                self._active, self._waiting)
            self._log.info(f"uploading step {last.step} to the mirror: {size / 1e6:.3g} MB")
            return
        needed_s = size / self.bytes_per_s
        before = 0 if self._active is None or self._waiting is None else self._size(
            self._active.step) - self._active_bytes
        self._leave_out_active = before > 0 and (
            needed_s <= left_s < needed_s + before / self.bytes_per_s)
        text = (f"uploading step {last.step} to the mirror: {size / 1e6:.3g} MB take about "
                f"{needed_s:.0f} s at {self.bytes_per_s / 1e6:.3g} MB/s, {left_s:.0f} s are left")
        (self._log.info if needed_s <= left_s else self._log.warning)(text)

    def _size(self, step: int) -> int:
        try:
            return total_bytes(self._local.find(step).manifest)
        except CheckpointDamaged:
            return 0

    # --- the thread

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (upload := self._next()) is not None:
            try:
                self._mirror(upload)
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

    def _next(self) -> _Upload | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            if self._is_closed:
                return None
            self._active, self._waiting = self._waiting, None
            self._active_bytes, self._leave_out_active = 0, False
            return self._active

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
            # At the end of the run the pause is short; a newer save doesn't shorten it.
            self._changed.wait_for(lambda: self._is_last or self._is_closed, pause_s)
            self._changed.wait_for(lambda: self._is_closed, FIRST_PAUSE_S * self._is_last)

    def _mirror(self, upload: _Upload) -> None:
        """Upload a checkpoint, after that of the best weights until then."""
        self._prepare()
        best = SavedState.read(self._local.find(upload.step).path).best.step
        if best not in (0, upload.step) and self._local.checksum(best):
            self._upload_checkpoint(best, upload)
        newest = self._upload_checkpoint(upload.step, upload)
        if upload.is_product:
            self._upload_product(upload)
        if newest is not None and not (self._is_last and not upload.is_product):
            self._verify(newest)
            self._prune()

    def _prepare(self) -> None:
        """List the mirror, and delete what dead writers have left in it."""
        if not self._owns:
            self.take(self.owner)
        if self._manifests is not None:
            return
        found: dict[MirrorEntry, dict[str, Any]] = {}
        for entry in (*self.mirror.entries(), *self.mirror.entries(FINISHED)):
            try:
                found[entry] = self.mirror.manifest(entry)
            except CheckpointDamaged as error:
                self._log.warning(str(error))
        used = {manifest["data"] for manifest in found.values()}
        orphans = [stored.key for stored in self.mirror.store.list(DATA)
                   if stored.key.rpartition("/")[0] not in used]
        self._records = {stored.key for stored in self.mirror.store.list(RECORDS)}
        self._manifests = found
        self._delete(orphans)
        try:
            aborted = abort_open_uploads(self.mirror.store.url)
        except OSError as error:  # urllib's: these only cost storage, and a bucket's rule helps too
            self._log.event("mirror-uploads-left", why=str(error))
        else:
            if aborted:
                self._log.event("mirror-uploads-aborted", count=aborted)

    def _upload_checkpoint(self, step: int, upload: _Upload) -> MirrorEntry | None:
        """Upload and commit the local checkpoint of a step; None if it is in the mirror."""
        info, began_s = self._local.find(step), self._clock()
        entry = MirrorEntry(info.generation or 0, step)
        assert self._manifests is not None
        if entry in self._manifests:
            return None
        if entry.generation > self.owner.generation:  # after a rollback
            self._swap(dataclasses.replace(self.owner, generation=entry.generation),
                       self._check_owner())
        state = SavedState.read(info.path)
        bad = state.progress.consecutive_bad_steps
        manifest = {name: value for name, value in info.manifest.items() if name != "checksum"}
        self._commit(entry, manifest | {
            "best": state.best.step, "good": bad[0] - 1 if bad else step,
            "records": self._put_records(state.record.offset if state.record else None)},
            info.path)
        seconds, lag_s = self._clock() - began_s, self._clock() - upload.since_s
        size = total_bytes(info.manifest)
        self.bytes_per_s, self.lag_s = size / max(seconds, 1e-6), lag_s
        self._log.event("mirror", at_step=step, generation=entry.generation, bytes=size,
                        seconds=round(seconds, 6), mb_per_s=round(self.bytes_per_s / 1e6, 3),
                        lag_s=round(lag_s, 6))
        return entry

    def _upload_product(self, upload: _Upload) -> None:
        entry = MirrorEntry(self.owner.generation, upload.step, FINISHED)
        size = (self._folder / layout.PRODUCT).stat().st_size
        manifest = {"run": self.owner.run, "generation": entry.generation, "step": entry.step,
                    "kind": "product", "files": {layout.PRODUCT: {"bytes": size}},
                    "records": self._put_records(None)}
        self._commit(entry, manifest, self._folder)
        self._log.event("mirror", at_step=upload.step, bytes=size, product=True)

    def _commit(self, entry: MirrorEntry, manifest: dict[str, Any], folder: Path) -> None:
        """Upload the files of a manifest, then the manifest."""
        store = self.mirror.store
        data = f"{DATA}/{layout.step_name(entry.step)}-{secrets.token_hex(4)}"
        files = {name: self._upload_file(f"{data}/{name}", folder / name, file)
                 for name, file in manifest["files"].items()}
        manifest = {**manifest, "files": files, "data": data}
        self._check_owner()
        try:
            store.put_new(entry.key, encode_manifest(manifest))
        except Conflict:
            there = self.mirror.manifest(entry)
            if there["files"] != files:
                raise CheckpointDamaged(f"{entry.key} exists, with other content") from None
            manifest = there  # the answer to a first try was lost, or a dead attempt wrote it
        assert self._manifests is not None
        self._manifests[entry] = manifest

    def _upload_file(self, key: str, path: Path, file: Mapping[str, Any]) -> dict[str, Any]:
        """Upload a file and return its entry for a manifest. Raises CheckpointDamaged if it is not
        the one that `file` describes."""
        hasher = xxhash.xxh3_128()

        def on_chunk(chunk: memoryview) -> None:
            if self._leave_out_active or self._is_closed:
                raise _Abandoned
            hasher.update(chunk)
            self._active_bytes += len(chunk)

        self.mirror.store.upload(key, path, on_chunk)
        found = {"bytes": path.stat().st_size, "xxh3_128": hasher.hexdigest()}
        if {**found, **file} != found:
            raise CheckpointDamaged(f"{path.name} doesn't match its checksum")
        return found

    def _put_records(self, metrics_bytes: int | None) -> dict[str, list[tuple[str, int]]]:
        """Upload new parts of the records: those of metrics.jsonl up to a position, the others to
        their end. Returns hash and size of all parts by name."""
        parts: dict[str, list[tuple[str, int]]] = {}
        for name in (*LINES, *DOCUMENTS):
            limit = metrics_bytes if name == layout.METRICS else None
            for data in _read_parts(self._folder / name, limit):
                digest = xxhash.xxh3_128_hexdigest(data)
                parts.setdefault(name, []).append((digest, len(data)))
                key = record_key(name, digest)
                if key not in self._records:
                    self.mirror.store.put(key, data)  # its name says what it contains
                    self._records.add(key)
        return parts

    def _verify(self, entry: MirrorEntry) -> None:
        """Read a checkpoint back; one that is damaged there is deleted and uploaded again."""
        try:
            self.mirror.verify(entry)
        except CheckpointDamaged as error:
            self._forget(entry)
            raise StoreError(f"read back, {error}") from error

    def _prune(self) -> None:
        """Delete older checkpoints and products. The newest one is verified."""
        assert self._manifests is not None
        saved, products = ([e for e in sorted(self._manifests) if e.kind == kind]
                           for kind in (CHECKPOINTS, FINISHED))
        every, kept = self._policy.keep_every, saved[-self._policy.keep :]
        protect = {self._manifests[entry]["best"] for entry in kept}
        protect |= {max((e.step for e in saved if e.step <= self._manifests[entry]["good"]),
                        default=0) for entry in kept}  # to which a rollback would go
        for entry in saved[: -self._policy.keep]:
            if entry.step not in protect and not (every and entry.step % every == 0):
                self._forget(entry)
        for entry in products[:-1]:
            self._forget(entry)
        used = {record_key(name, digest) for manifest in self._manifests.values()
                for name, parts in manifest["records"].items() for digest, _ in parts}
        self._delete(sorted(self._records - used))
        self._records &= used

    def _forget(self, entry: MirrorEntry) -> None:
        assert self._manifests is not None
        manifest = self._manifests[entry]
        if self._delete([entry.key]):
            del self._manifests[entry]
            self._delete([f"{manifest['data']}/{name}" for name in manifest["files"]])

    def _delete(self, keys: list[str]) -> bool:
        """Delete objects, as the owner. Returns whether that is permitted."""
        for key in keys if self._may_delete else ():
            self._check_owner()
            try:
                self.mirror.store.delete([key])
            except AccessDenied as error:
                self._may_delete = False
                self._log.event("mirror-not-pruned", why=str(error))
                self._log.warning("the credentials don't permit to delete objects of the mirror: "
                                  f"it keeps all checkpoints ({error})")
        return self._may_delete


def _read_parts(path: Path, limit: int | None) -> Iterator[bytes]:
    """The first `limit` bytes of a file, in parts; nothing if it is missing."""
    if not path.exists():
        return
    left = os.path.getsize(path) if limit is None else limit
    with path.open("rb") as file:
        while left > 0 and (data := file.read(min(left, RECORD_BYTES))):
            left -= len(data)
            yield data
