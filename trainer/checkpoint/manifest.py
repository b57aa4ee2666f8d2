"""The files of one checkpoint and its manifest: writing, reading and verifying them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.errors import CheckpointDamaged
from trainer.storage.files import fsync_folder, read_chunks, write_file
from trainer.storage.layout import MANIFEST

Buffer = Any  # an object with a contiguous buffer: bytes, a memoryview, an array


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as its manifest describes it; its data has not been read."""

    path: Path
    step: int
    generation: int | None = None
    run: str | None = None
    kind: str | None = None
    manifest: Mapping[str, Any]
    """Empty, and the values above None, if it is damaged."""
    why: str | None = None
    """What is wrong with the manifest, or None."""


class StagedCheckpoint:
    """A checkpoint that is being written to a temporary folder. Calls `midway` after the first
    buffer, and `publish` when all files are durable, to rename the folder to its final name."""

    def __init__(
        self, path: Path, *, step: int, generation: int, midway: Callable[[], None],
        publish: Callable[[], CheckpointInfo],
    ) -> None:
        self.path, self.step, self.generation = path, step, generation
        self.bytes_tried = 0
        self._midway, self._publish = midway, publish
        self._files: dict[str, dict[str, Any]] = {}

    def write(self, name: str, content: Buffer | Iterable[Buffer]) -> None:
        """Write and hash a file of one or several buffers; it is durable on return."""
        before, hasher = self.bytes_tried, xxhash.xxh3_128()
        write_file(self.path / name, self._counted(content), hasher.update)
        size = self.bytes_tried - before
        self._files[name] = {"bytes": size, "xxh3_128": hasher.hexdigest()}

    def commit(self, *, kind: str, run: str = "") -> CheckpointInfo:
        """Publish the checkpoint atomically, then read it back from disk and verify it.

        Args:
            kind: reason of the save: "periodic", "best", "stop" or "survivor".

        Raises:
            CheckpointDamaged: it doesn't read back as written; an older one was put back.
            StaleAttempt: raised by the store's guard; nothing was published.
        """
        manifest = encode_manifest({"run": run, "generation": self.generation, "step": self.step,
                                    "kind": kind, "files": self._files})
        write_file(self.path / MANIFEST, self._counted(manifest))
        fsync_folder(self.path)
        return self._publish()

    def _counted(self, content: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
        with suppress(TypeError):  # first, since an array is iterable too
            content = [memoryview(content)]  # type: ignore[arg-type]
        for buffer in content:
            view = memoryview(buffer)
            if view.nbytes:  # an empty view can't be cast
                before, self.bytes_tried = self.bytes_tried, self.bytes_tried + view.nbytes
                yield view.cast("B")
                if not before:
                    self._midway()


def encode_manifest(fields: Mapping[str, Any]) -> bytes:
    """The manifest as JSON; its last member is the hash of all bytes before it."""
    body = json.dumps(fields, indent=2, allow_nan=False).removesuffix("\n}").encode()
    return body + _tail(body)


def read_manifest(path: Path, step: int) -> CheckpointInfo:
    """Read the manifest of a checkpoint; a damaged one sets `why` and doesn't raise."""
    try:
        manifest = parse_manifest((path / MANIFEST).read_bytes())
        if manifest["step"] != step:
            raise ValueError(f"{MANIFEST} is that of step {manifest['step']}")
    except FileNotFoundError:
        why = f"{MANIFEST} is missing"
    except OSError as error:
        why = f"{MANIFEST} can't be read: {error.strerror}"
    except (ValueError, KeyError) as error:
        why = str(error)
    else:
        return CheckpointInfo(path=path, step=step, generation=manifest["generation"],
                              run=manifest["run"], kind=manifest["kind"], manifest=manifest)
    return CheckpointInfo(path=path, step=step, manifest={}, why=why)


def verify_sizes(info: CheckpointInfo) -> CheckpointInfo:
    """Compare the sizes of all files of a checkpoint with its manifest. Raises CheckpointDamaged,
    with the folder, the file and the difference."""
    return _check(info, _size_difference)


def verify(path: Path, step: int) -> CheckpointInfo:
    """Read a manifest, and compare sizes and hashes of all files with it, as `verify_sizes`."""
    return _check(verify_sizes(read_manifest(path, step)), _content_difference)


def _check(
    info: CheckpointInfo, difference: Callable[[Path, Mapping[str, Any]], str | None]
) -> CheckpointInfo:
    found = (difference(info.path / name, entry)
             for name, entry in info.manifest.get("files", {}).items())
    if why := info.why or next(filter(None, found), None):
        raise CheckpointDamaged(f"{info.path.name}: {why}")
    return info


def _size_difference(path: Path, entry: Mapping[str, Any]) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a file"
    if status.st_size != entry["bytes"]:
        return f"{path.name} has {status.st_size} bytes instead of {entry['bytes']}"
    return None


def _content_difference(path: Path, entry: Mapping[str, Any]) -> str | None:
    hasher = xxhash.xxh3_128()
    try:
        read_chunks(path, hasher.update)
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror}"
    equal = hasher.hexdigest() == entry["xxh3_128"]
    return None if equal else f"{path.name} doesn't match its checksum"


def _tail(body: bytes) -> bytes:
    return b',\n  "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def parse_manifest(raw: bytes) -> dict[str, Any]:
    """Decode a manifest. Raises ValueError if it is damaged."""
    body = raw[: -len(_tail(b""))]
    if not raw:
        raise ValueError(f"{MANIFEST} is empty")
    if raw != body + _tail(body):
        raise ValueError(f"{MANIFEST} doesn't match its own checksum: cut short or altered")
    manifest: dict[str, Any] = json.loads(raw)
    return manifest
