"""The mirror of a run in an object store: its layout, and how it is read.

    owner                                   who may write: {"run", "generation", "nonce", …}
    checkpoints/gGGGGGG-step-NNNNNNNN.json  a complete checkpoint: its manifest, written last
    finished/gGGGGGG-step-NNNNNNNN.json     the product of the finished run, likewise
    data/step-NNNNNNNN-NONCE/FILE           the files of a manifest
    records/NAME-HASH                       parts of metrics.jsonl, events.jsonl and other records

A manifest is that of the local checkpoint (generation, step, kind, run, sizes, hashes), and names
the folder of its files, the step of the best weights, and the parts of the records. Objects other
than `owner` are never changed, so a reader never sees half of a checkpoint. Newest is the one with
the highest (generation, step). `mirror_fence` describes how generations are given.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.checkpoint.manifest import LISTED_FILE, CheckpointInfo, parse_manifest
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged, ConfigError, MirrorFailed
from trainer.storage import layout
from trainer.storage.files import make_folder, read_file, replace_bytes
from trainer.storage.object_store import Missing, ObjectStore, StoreError, Version
from trainer.storage.records import (
    Kind,
    is_count,
    is_text,
    list_of,
    optional,
    parse_json,
    table_of,
)
from trainer.telemetry.events import Log

OWNER, CHECKPOINTS, FINISHED, DATA, RECORDS = "owner", "checkpoints", "finished", "data", "records"
LINES = (layout.METRICS, layout.EVENTS, layout.TIMING)
DOCUMENTS = (layout.IDENTITY, layout.CONFIG, layout.ENVIRONMENT, layout.SUMMARY)
"""Files of a run folder that each manifest records: growing files of lines, and small ones."""
_OWNER = Kind({"run": is_text, "generation": is_count, "nonce": is_text, "attempt": is_count,
               "launch": optional(is_text), "host": is_text}, others=lambda _: False)
_MANIFEST = Kind({
    "run": is_text, "generation": is_count, "step": is_count, "kind": is_text, "checksum": is_text,
    "data": is_text, "files": Kind(others=LISTED_FILE),
    "records": table_of(list_of(lambda part: type(part) is list and len(part) == 2
                                and is_text(part[0]) and is_count(part[1])))},
    known={"best": is_count, "good": is_count, "kept": list_of(is_count)})
_KEY = re.compile(r"(?:checkpoints|finished)/g(\d{6,})-" + layout.STEP_NAME + r"\.json")


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The content of the object `owner`: the attempt that may write, for readers too."""

    run: str
    generation: int
    nonce: str
    """Of the attempt."""
    attempt: int = 0
    launch: str | None = None
    """Equal in all attempts of one launcher."""
    host: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, order=True)
class MirrorEntry:
    """A manifest in the mirror. The newest one is the largest."""

    generation: int
    step: int
    kind: str = CHECKPOINTS
    """The folder of its key: CHECKPOINTS or FINISHED."""

    @property
    def key(self) -> str:
        return f"{self.kind}/g{self.generation:06d}-{layout.step_name(self.step)}.json"

    @property
    def name(self) -> str:
        return f"{layout.step_name(self.step)} in the mirror"


class NotAMirror(StoreError):
    """The objects under the URL are not those of a mirror."""


class Mirror:
    """Reads a mirror. All methods raise StoreError if the store can't be reached, and
    CheckpointDamaged if an object is missing or not what its manifest says.

    Args:
        progress: called after each part of a download.
    """

    def __init__(
        self, store: ObjectStore, *, progress: Callable[[], object] = lambda: None
    ) -> None:
        self.store, self._progress = store, progress

    @classmethod
    def open(cls, url: str, *, flag: str = "--checkpoint.mirror", create: bool = True,
             progress: Callable[[], object] = lambda: None) -> Mirror:
        """The mirror at a URL; ConfigError, which begins with `flag`, if it can't be opened. The
        folder of a `file://` URL is created if it is missing, only with `create`."""
        try:
            return cls(ObjectStore.open(url, create=create), progress=progress)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{flag} {url}: obstore is not installed; "
                              "pip install 'trainer[remote]'.") from error
        except StoreError as error:
            raise ConfigError(f"{flag} {url}: {error}.") from error

    def owner(self) -> tuple[Owner, Version] | None:
        """The current owner; None if no run has used the mirror."""
        if (found := self.store.read(OWNER)) is None:
            return None
        try:
            owner = parse_json(found[0])
        except ValueError:
            owner = None
        if why := _OWNER.problem(owner):
            raise NotAMirror(f"the object {OWNER} is not that of a mirror: {why}")
        return Owner(**owner), found[1]

    def entries(self, kind: str = CHECKPOINTS) -> list[MirrorEntry]:
        """The committed checkpoints (or products, of kind FINISHED), oldest first."""
        matches = (_KEY.fullmatch(key) for key, _ in self.store.list(kind))
        return sorted(MirrorEntry(int(m[1]), int(m[2]), kind) for m in matches if m)

    def manifest(self, entry: MirrorEntry) -> dict[str, Any]:
        """The manifest of a checkpoint or product."""
        found = self.store.read(entry.key)
        try:
            if found is None:
                raise ValueError("its manifest is missing")
            manifest = parse_manifest(found[0], _MANIFEST)
            if (manifest["generation"], manifest["step"]) != (entry.generation, entry.step):
                raise ValueError("its manifest is that of another checkpoint")
        except ValueError as error:
            raise CheckpointDamaged(f"{entry.name}: {error}") from error
        return manifest

    def content(self, manifest: Mapping[str, Any], name: str) -> Iterator[memoryview]:
        """The bytes of a file of a manifest, in parts; verified after the last one."""
        key, file = f"{manifest['data']}/{name}", manifest["files"][name]
        place = f"{layout.step_name(manifest['step'])} in the mirror"
        hasher, size = xxhash.xxh3_128(), 0
        try:
            for part in self.store.download(key, file["bytes"]):
                hasher.update(part)
                size += len(part)
                self._progress()
                yield part
        except Missing as error:
            raise CheckpointDamaged(f"{place}: {key} is missing") from error
        if (size, hasher.hexdigest()) != (file["bytes"], file["xxh3_128"]):
            raise CheckpointDamaged(f"{place}: {name} doesn't match its checksum")

    def verify(self, entry: MirrorEntry) -> None:
        """Read all files of a manifest back and compare their hashes."""
        manifest = self.manifest(entry)
        for name in manifest["files"]:
            deque(self.content(manifest, name), maxlen=0)

    def fetch(self, entry: MirrorEntry, local: Store) -> CheckpointInfo:
        """Download a checkpoint, verify it, and commit it to the local checkpoint folder."""
        manifest = self.manifest(entry)
        with local.stage(entry.step, generation=entry.generation,
                         expected_bytes=total_bytes(manifest)) as stage:
            for name in manifest["files"]:
                stage.write(name, self.content(manifest, name))
            return stage.commit(kind=manifest["kind"], run=manifest["run"])

    def fetch_records(self, entry: MirrorEntry, folder: Path,
                      names: Collection[str] = (*LINES, *DOCUMENTS)) -> None:
        """Write the records of a run, as they were at a checkpoint, into a run folder. Events and
        times there that the mirror doesn't have are kept, after those of the mirror."""
        make_folder(folder)
        for name, parts in self.manifest(entry)["records"].items():
            if name in names:
                data, path = b"".join(self._record(name, *part) for part in parts), folder / name
                if name in (layout.EVENTS, layout.TIMING) and path.exists():
                    known = set(data.splitlines())
                    data += b"".join(line for line in read_file(path).splitlines(keepends=True)
                                     if line.rstrip(b"\n") not in known)
                replace_bytes(path, [data], mode=0o600 if name == layout.CONFIG else 0o666)

    def fetch_product(self, entry: MirrorEntry, folder: Path) -> None:
        """Write product and records of a finished run into a run folder."""
        manifest = self.manifest(entry)
        replace_bytes(folder / layout.PRODUCT, self.content(manifest, layout.PRODUCT))
        self.fetch_records(entry, folder)

    def _record(self, name: str, digest: str, size: int) -> bytes:
        found = self.store.read(record_key(name, digest))
        if found is None or xxhash.xxh3_128_hexdigest(found[0]) != digest or len(found[0]) != size:
            raise CheckpointDamaged(f"{name} in the mirror: a part of {size} bytes is damaged")
        return found[0]


class MirrorSource:
    """What rank 0 finds in the mirror at a start, and continues from; nothing without a mirror.

    Args:
        entries, products: the checkpoints, and the products of the finished run.
        is_reached: whether the store has answered.
        log: gets a line and an event for each download.
        claim: called before a download, to take the lock of the run folder.
    """

    def __init__(
        self, mirror: Mirror | None = None, *, owner: Owner | None = None,
        entries: Sequence[MirrorEntry] = (), products: Sequence[MirrorEntry] = (),
        log: Log | None = None, claim: Callable[[], object] = lambda: None, is_reached: bool = True,
    ) -> None:  # fmt: skip
        self.mirror, self.owner, self.entries = mirror, owner, entries
        self.is_reached = is_reached
        self._products, self._log, self._claim = products, log or Log(), claim
        self._fetched: set[MirrorEntry] = set()

    @property
    def record(self) -> dict[str, Any] | None:
        """The run in the mirror, as run.json describes one; None if it is empty."""
        return None if self.owner is None else {
            "run": self.owner.run, "attempt": self.owner.attempt,
            "step": max((entry.step for entry in self.entries), default=0)}

    @property
    def generation(self) -> int:
        """The latest generation in the mirror."""
        return max([entry.generation for entry in self.entries]
                   + [0 if self.owner is None else self.owner.generation])

    def lacks_product(self, step: int) -> bool:
        """Whether the mirror could be read and has no product of the run that ended at a step."""
        return self.owner is not None and step not in {p.step for p in self._products}

    def fetch(self, entry: MirrorEntry, local: Store) -> None:
        """Download a checkpoint, verify it and commit it locally. Raises CheckpointDamaged, and
        MirrorFailed if the store can't be reached."""
        self._claim()
        began_s = time.monotonic()
        with self._reached() as mirror:
            info = mirror.fetch(entry, local)
        self._fetched.add(entry)
        size, seconds = total_bytes(info.manifest), time.monotonic() - began_s
        self._log.event("fetched", at_step=entry.step, bytes=size, seconds=round(seconds, 6))
        self._log.info(f"fetched step {entry.step} from the mirror: {size / 1e6:.3g} MB in "
                       f"{seconds:.1f} s")

    def restore_records(self, entry: MirrorEntry, folder: Path) -> None:
        """If a checkpoint was fetched, write the metric lines and events of its run, and the
        product if the run ended with it, into the run folder. Raises MirrorFailed."""
        # An earlier start may have ended after the download of its checkpoint and before this.
        if entry not in self._fetched and (
                entry not in self.entries or (folder / layout.METRICS).exists()):
            return
        self._claim()
        try:
            with self._reached() as mirror:
                mirror.fetch_records(entry, folder, [n for n in LINES if n != layout.METRICS])
                mirror.fetch_records(entry, folder, [layout.METRICS])  # last: it says all are here
                for product in self._products:
                    if product.step == entry.step:
                        mirror.fetch_product(product, folder)
        except CheckpointDamaged as error:
            self._log.warning(f"records of the run are lost: {error}")

    @contextmanager
    def _reached(self) -> Iterator[Mirror]:
        assert self.mirror is not None
        try:
            yield self.mirror
        except StoreError as error:
            raise MirrorFailed(f"--checkpoint.mirror {self.mirror.store.url}: {error}. A restart "
                               "tries again") from error


def total_bytes(manifest: Mapping[str, Any]) -> int:
    """The size of all files of a manifest."""
    return sum(file["bytes"] for file in manifest["files"].values())


def record_key(name: str, digest: str) -> str:
    """The key of a part of a record."""
    return f"{RECORDS}/{name}-{digest}"
