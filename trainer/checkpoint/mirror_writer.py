"""Write the checkpoints of a run to its mirror: upload, commit, verify, prune."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    RECORDS,
    MirrorEntry,
    record_key,
)
from trainer.checkpoint.mirror_fence import Fence
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged
from trainer.storage import layout
from trainer.storage.files import open_regular
from trainer.storage.object_store import AccessDenied, Conflict, StoreError
from trainer.storage.open_uploads import abort_open_uploads
from trainer.telemetry.events import Log

RECORD_BYTES = 1 << 20
"""Size of the parts of a record: the full ones are uploaded once, the last one with each save."""
Parts = dict[str, list[tuple[str, int]]]
"""Name of a record → hash and size of each part."""


@dataclass(frozen=True, kw_only=True)
class MirrorPolicy:
    """Which saves are uploaded, and which of them are kept."""

    every: int | None = None
    """Upload one periodic save per this many steps; None: each one, 0: none."""
    keep: int = 3
    keep_every: int | None = None
    """See `Store`."""


class MirrorWriter:
    """Writes the mirror behind a fence; called by one thread. All methods raise StoreError, and
    MirrorTaken before a commit or a deletion if another start has taken over.

    Args:
        local: the checkpoint folder of the run folder `folder`.
        on_chunk: called with each chunk of an upload; may raise, which aborts it.
    """

    def __init__(
        self, fence: Fence, local: Store, folder: Path, policy: MirrorPolicy, *, log: Log,
        on_chunk: Callable[[memoryview], object] = len,
    ) -> None:  # fmt: skip
        self._fence, self._mirror, self._objects = fence, fence.mirror, fence.mirror.store
        self._local, self._folder, self._policy = local, folder, policy
        self._log, self._on_chunk = log, on_chunk
        self._manifests: dict[MirrorEntry, dict[str, Any]] | None = None  # None: not listed yet
        self._records: set[str] = set()  # keys of the parts that are there
        self._may_delete = True

    @property
    def manifests(self) -> dict[MirrorEntry, dict[str, Any]]:
        """The manifests in the mirror. At first they are listed, and what dead writers have left is
        deleted."""
        if not self._fence.is_held:  # the store could not be reached at the start
            self._fence.take(self._fence.owner)
        if self._manifests is None:
            found: dict[MirrorEntry, dict[str, Any]] = {}
            for entry in (*self._mirror.entries(), *self._mirror.entries(FINISHED)):
                try:
                    found[entry] = self._mirror.manifest(entry)
                except CheckpointDamaged as error:
                    self._log.warning(str(error))
            used = {manifest["data"] for manifest in found.values()}
            orphans = [key for key, _ in self._objects.list(DATA)
                       if key.rpartition("/")[0] not in used]
            self._records = {key for key, _ in self._objects.list(RECORDS)}
            self._manifests = found
            self._delete(orphans)
            self._abort_open_uploads()
        return self._manifests

    def _abort_open_uploads(self) -> None:
        try:
            aborted = abort_open_uploads(self._objects.url)
        except OSError as error:  # of urllib; they only cost storage, and a bucket's rule helps too
            self._log.event("mirror-uploads-left", why=str(error))
        else:
            if aborted:
                self._log.event("mirror-uploads-aborted", count=aborted)

    def upload(self, step: int) -> MirrorEntry | None:
        """Upload and commit the local checkpoint of a step; None if it is in the mirror. Raises
        CheckpointDamaged if the local one is damaged or missing."""
        info = self._local.find(step)
        entry = MirrorEntry(info.generation or 0, step)
        if entry in self.manifests:
            return None
        self._fence.raise_to(entry.generation)
        state = SavedState.read(info.path)
        bad = state.progress.consecutive_bad_steps
        manifest = {name: value for name, value in info.manifest.items() if name != "checksum"}
        self._commit(entry, manifest | {
            "best": state.best.step, "good": bad[0] - 1 if bad else step,
            "kept": state.parts.get("cycles", {}).get("ends", []),
            "records": self._put_records(state.record.offset if state.record else None)},
            info.path)
        return entry

    def upload_product(self, step: int) -> None:
        """Upload and commit the product of the run, which has ended at a step, and its records."""
        entry = MirrorEntry(self._fence.owner.generation, step, FINISHED)
        if entry not in self.manifests:
            size = (self._folder / layout.PRODUCT).stat().st_size
            self._commit(entry, {
                "run": self._fence.owner.run, "generation": entry.generation, "step": step,
                "kind": "product", "files": {layout.PRODUCT: {"bytes": size}},
                "records": self._put_records(None)}, self._folder)

    def verify(self, entry: MirrorEntry) -> None:
        """Read a checkpoint back. One that is damaged there is deleted, and StoreError raised."""
        try:
            self._mirror.verify(entry)
        except CheckpointDamaged as error:
            self._forget([entry])
            raise StoreError(f"read back, {error}") from error

    def prune(self) -> None:
        """Delete older checkpoints and products. The newest one must have been verified."""
        saved, products = ([e for e in sorted(self.manifests) if e.kind == kind]
                           for kind in (CHECKPOINTS, FINISHED))
        every, kept = self._policy.keep_every, saved[-self._policy.keep :]
        protect = {step for entry in kept for step in (
            self.manifests[entry]["best"], *self.manifests[entry].get("kept", ()))}
        protect |= {max((e.step for e in saved if e.step <= self.manifests[entry]["good"]),
                        default=0) for entry in kept}  # to which a rollback would go
        self._forget([*products[:-1], *(
            entry for entry in saved[: -self._policy.keep]
            if entry.step not in protect and not (every and entry.step % every == 0))])

    def _commit(self, entry: MirrorEntry, manifest: dict[str, Any], folder: Path) -> None:
        """Upload the files of a manifest, then the manifest."""
        data = f"{DATA}/{layout.step_name(entry.step)}-{secrets.token_hex(4)}"
        files = {name: self._upload_file(f"{data}/{name}", folder / name, file)
                 for name, file in manifest["files"].items()}
        manifest = {**manifest, "files": files, "data": data}
        self._fence.check()
        try:
            self._objects.put_new(entry.key, encode_manifest(manifest))
        except Conflict:
            there = self._mirror.manifest(entry)
            if there["files"] != files:
                raise CheckpointDamaged(f"{entry.key} exists, with other content") from None
            manifest = there  # the answer to a first try was lost, or a dead attempt wrote it
        self.manifests[entry] = manifest

    def _upload_file(self, key: str, path: Path, file: Mapping[str, Any]) -> dict[str, Any]:
        """Upload a file and return its entry for a manifest. Raises CheckpointDamaged if it is not
        the one that `file` describes."""
        hasher = xxhash.xxh3_128()

        def on_chunk(chunk: memoryview) -> None:
            self._on_chunk(chunk)
            hasher.update(chunk)

        self._objects.upload(key, path, on_chunk)
        found = {"bytes": path.stat().st_size, "xxh3_128": hasher.hexdigest()}
        if {**found, **file} != found:
            raise CheckpointDamaged(f"{path.name} doesn't match its checksum")
        return found

    def _put_records(self, metrics_bytes: int | None) -> Parts:
        """Upload new parts of the records: those of metrics.jsonl up to a position, the others to
        their end. Returns all parts."""
        parts: Parts = {}
        for name in (*LINES, *DOCUMENTS):
            limit = metrics_bytes if name == layout.METRICS else None
            for data in _read_parts(self._folder / name, limit):
                digest = xxhash.xxh3_128_hexdigest(data)
                parts.setdefault(name, []).append((digest, len(data)))
                key = record_key(name, digest)
                if key not in self._records:
                    self._objects.put(key, data)  # its name says what it contains
                    self._records.add(key)
        return parts

    def _forget(self, entries: Sequence[MirrorEntry]) -> None:
        """Delete manifests, then their files, and records that no other manifest has."""
        unused = list[str]()
        if self._delete([entry.key for entry in entries]):
            for manifest in map(self.manifests.pop, entries):
                unused += [f"{manifest['data']}/{name}" for name in manifest["files"]]
        used = {record_key(name, digest) for manifest in self.manifests.values()
                for name, parts in manifest["records"].items() for digest, _ in parts}
        self._delete([*unused, *sorted(self._records - used)])
        self._records &= used

    def _delete(self, keys: Sequence[str]) -> bool:
        """Delete objects, as the owner. Returns whether that is permitted."""
        if keys and self._may_delete:
            self._fence.check()
            try:
                self._objects.delete(keys)
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
    with open(open_regular(path), "rb") as file:
        while left > 0 and (data := file.read(min(left, RECORD_BYTES))):
            left -= len(data)
            yield data
