"""The files of one checkpoint and its manifest: writing, reading and verifying them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.errors import CheckpointDamaged, FileDamaged
from trainer.storage.files import (
    fsync_folder,
    open_regular,
    read_chunks,
    read_file,
    replace_bytes,
    write_file,
)
from trainer.storage.layout import MANIFEST, MODEL, OPTIMIZER, PRODUCT, STATE, SUMMARY
from trainer.storage.records import Kind, is_count, is_name, is_text, parse_json, read_json

Buffer = Any  # an object with a contiguous buffer: bytes, a memoryview, an array

LISTED_FILE = Kind({"bytes": is_count, "xxh3_128": is_text})
"""Size and hash of a file, in a manifest or a summary."""
_MANIFEST = Kind({
    "run": is_text, "generation": is_count, "step": is_count, "kind": is_text, "checksum": is_text,
    "files": Kind(dict.fromkeys((MODEL, OPTIMIZER, STATE), LISTED_FILE), others=LISTED_FILE)})


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
            before, self.bytes_tried = self.bytes_tried, self.bytes_tried + view.nbytes
            yield view
            if self.bytes_tried and not before:
                self._midway()


def encode_manifest(fields: Mapping[str, Any]) -> bytes:
    """The manifest as JSON; its last member is the hash of all bytes before it."""
    body = json.dumps(fields, indent=2, allow_nan=False).removesuffix("\n}").encode()
    return body + _tail(body)


def read_manifest(path: Path, step: int) -> CheckpointInfo:
    """Read the manifest of a checkpoint; a damaged one sets `why` and doesn't raise."""
    try:
        if path.is_symlink():  # what is deleted or written there would be elsewhere
            raise ValueError("it is a symbolic link, which isn't followed")
        manifest = parse_manifest(read_file(path / MANIFEST))
        if manifest["step"] != step:
            raise ValueError(f"{MANIFEST} is that of step {manifest['step']}")
    except FileNotFoundError:
        why = f"{MANIFEST} is missing"
    except FileDamaged:
        why = f"{MANIFEST} is no regular file, or too large"
    except ValueError as error:
        why = str(error)
    except OSError as error:
        why = f"{MANIFEST} can't be read: {error.strerror}"
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


def check_listed(path: Path) -> None:
    """Compare a file of weights with the size and hash in the manifest of its checkpoint, or in the
    summary of its run, if it is in the folder of one. Raises CheckpointDamaged."""
    entry = None
    with suppress(OSError, ValueError):
        entry = parse_manifest(read_file(path.with_name(MANIFEST)))["files"].get(path.name)
    if path.name == PRODUCT and entry is None:
        entry = (read_json(path.with_name(SUMMARY), Kind(known={"product": LISTED_FILE})) or {}
                 ).get("product")
    if entry is not None and (
            why := _size_difference(path, entry) or _content_difference(path, entry)):
        raise CheckpointDamaged(f"{path.parent.name}: {why}")


def write_listed(path: Path, content: Iterable[Buffer]) -> dict[str, Any]:
    """Write a file atomically and durably; returns its size and hash, for `check_listed`."""
    hasher = xxhash.xxh3_128()
    replace_bytes(path, content, on_chunk=hasher.update)
    return {"bytes": path.stat().st_size, "xxh3_128": hasher.hexdigest()}


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
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read: {error.strerror or error}"
    if size != entry["bytes"]:
        return f"{path.name} has {size} bytes instead of {entry['bytes']}"
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


def parse_manifest(raw: bytes, kind: Kind = _MANIFEST) -> dict[str, Any]:
    """Decode a manifest. Raises ValueError if it is damaged or of another kind."""
    body = raw[: -len(_tail(b""))]
    if not raw:
        raise ValueError(f"{MANIFEST} is empty")
    if raw != body + _tail(body):
        raise ValueError(f"{MANIFEST} doesn't match its own checksum: cut short or altered")
    manifest: dict[str, Any] = parse_json(raw)
    if why := kind.problem(manifest):
        raise ValueError(f"{MANIFEST}: {why}")
    if others := [name for name in manifest["files"] if not is_name(name)]:
        raise ValueError(f"{MANIFEST} lists {others[0]!r}, which is no name of a file")
    return manifest
