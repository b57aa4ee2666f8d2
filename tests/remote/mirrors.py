"""Mirrors for tests: local checkpoints without torch, and object stores with faults."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from obstore.store import MemoryStore
from runs import state_json

from trainer.checkpoint.mirror import Mirror, Owner
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.mirror_writer import MirrorPolicy
from trainer.checkpoint.store import Store
from trainer.errors import CheckpointDamaged
from trainer.storage import layout
from trainer.storage.object_store import ObjectStore, StoreError
from trainer.telemetry.events import Log

RUN = "run-1"


class FaultyStore(ObjectStore):
    """An object store in memory. `before` is called with (operation, key) before each request, and
    may raise; `requests` has those that were made."""

    def __init__(self, store: Any = None) -> None:
        super().__init__(store or MemoryStore(), "memory://")
        self.before = lambda operation, key: None
        self.requests: list[tuple[str, str]] = []

    def _request(self, operation: str, key: str) -> None:
        self.before(operation, key)
        self.requests.append((operation, key))

    def put_new(self, key, data):
        self._request("put_new", key)
        super().put_new(key, data)

    def put(self, key, data):
        self._request("put", key)
        super().put(key, data)

    def replace(self, key, data, version):
        self._request("replace", key)
        super().replace(key, data, version)

    def read(self, key):
        self._request("read", key)
        return super().read(key)

    def upload(self, key, path, on_chunk):
        self._request("upload", key)
        super().upload(key, path, on_chunk)

    def download(self, key, size):
        self._request("download", key)
        return super().download(key, size)

    def list(self, prefix=""):
        self._request("list", prefix)
        return super().list(prefix)

    def delete(self, keys):
        for key in keys:
            self._request("delete", key)
            super().delete([key])

    def beside(self) -> FaultyStore:
        """The same objects, as another machine sees them."""
        return FaultyStore(self._store)

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key, _ in ObjectStore.list(self, prefix))


class Machine:
    """A machine with a disk, on which an attempt of the run saves and mirrors checkpoints."""

    def __init__(self, path: Path, store: ObjectStore, *, keep: int = 2, **policy: Any) -> None:
        self.path, self.store, self.clock_s = path, store, 0.0
        path.mkdir(exist_ok=True)
        self.local = Store(path / layout.CHECKPOINTS, run=RUN, keep=keep)
        self.console = io.StringIO()
        self.log = Log(stream=self.console)
        self.log.open_events(path / layout.EVENTS, attempt=0, nonce="")
        self.uploads = MirrorUploads(Mirror(store), self.local, path,
                                     MirrorPolicy(keep=keep, **policy), log=self.log,
                                     clock=lambda: self.clock_s)

    def take(self, *, nonce: str, generation: int | None = None) -> None:
        """Start an attempt."""
        if generation is None:
            found = Mirror(self.store).owner()
            generation = 1 if found is None else found[0].generation + 1
        self.uploads.fence.take(
            Owner(run=RUN, generation=generation, nonce=nonce, host=self.path.name))

    def save(self, step: int, *, best: int = 0, size: int = 10, generation: int | None = None,
             offset: int | None = None) -> None:
        """Write a local checkpoint, whose bytes depend on the step."""
        made = self.uploads.fence.owner.generation if generation is None else generation
        record = {} if offset is None else {
            "record": {"offset": offset, "checked": 0, "checksum": ""}}
        state = state_json(best=best, **record)
        with self.local.stage(step, generation=made) as stage:
            stage.write(layout.MODEL, b"%8d" % step * size)
            stage.write(layout.OPTIMIZER, b"moments")
            stage.write(layout.STATE, state)
            stage.commit(kind="periodic", run=RUN)

    def upload(self, step: int, **options: Any) -> None:
        """Save and mirror a step, in this thread."""
        self.save(step, **options)
        self.uploads.offer(step, always=True)
        self.work()

    def work(self) -> None:
        """What the thread of the mirror does for one upload."""
        self.uploads._upload(self.uploads._next())
        self.uploads._succeed()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.path / layout.EVENTS).read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


def newest(store: ObjectStore, folder: Path | None = None) -> int:
    """The step that an empty disk continues from: the newest checkpoint that is whole. With a
    folder it is fetched there."""
    mirror = Mirror(store)
    for entry in reversed(mirror.entries()):
        try:
            mirror.verify(entry)
            if folder is not None:
                info = mirror.fetch(entry, Store(folder / layout.CHECKPOINTS, run=RUN))
                assert (info.path / layout.MODEL).read_bytes()[:8] == b"%8d" % entry.step
        except CheckpointDamaged:
            continue
        return entry.step
    return 0


class Cut(StoreError):
    """The network is gone."""
