"""Append-only files of complete records (JSON lines).

A full disk delays records, but never drops or splits one of a single writer. A crash of the machine
can lose or cut records; the readers skip damaged lines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.storage.files import CHUNK, display_path, open_regular, read_file, replace_bytes
from trainer.storage.records import OBJECT, Kind, is_count, parse_json

TAIL_BYTES = 1 << 16
"""Most bytes that the checksum of a position covers; bytes of one read from the end."""
LARGEST_TAIL = 1 << 24
"""Most bytes that are read from the end for the last records."""
SAMPLES, SAMPLE_BYTES = 512, 4096
"""Number of records that `sample_records` returns, and the bytes read for each."""
WITH_STEP = Kind(needed={"step": is_count})


class AppendFile:
    """Appends records in order, each with one `write`, unless the disk fills up within it. Only
    records that can't be written stay in memory, until the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque()
        self._lock = threading.Lock()  # the writer thread appends events too
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size
        if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
            self._pending.append(b"\n")  # a crash of the machine has cut the last record

    @property
    def damage(self) -> str:
        """What another program has done to the file: "removed", "replaced", "cut", or ""."""
        mine = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except OSError:
            return "removed"
        if not os.path.samestat(mine, there):
            return "replaced"
        return "cut" if mine.st_size < self._size else ""

    def restore(self, *, others: bool = False) -> str:
        """Write a removed or replaced file back from the open descriptor; returns the `damage`.
        With `others`, which append to the file too, a file that replaced this one is theirs.
        Raises OSError if that fails; the open file is still used.
        """
        with self._lock:
            damage = self.damage
            if damage in ("removed", "replaced"):
                if damage == "removed" or not others:
                    size = os.fstat(self._descriptor).st_size
                    content = (os.pread(self._descriptor, CHUNK, offset)
                               for offset in range(0, size, CHUNK))
                    # Another process may be faster: its file is kept, since it may have grown.
                    replace_bytes(self._path, content, keep_other=damage == "removed")
                new = _open(self._path)
                os.close(self._descriptor)
                self._descriptor = new
            self._size = os.fstat(self._descriptor).st_size
            return damage

    def append(self, record: bytes) -> None:
        self._pending.append(record)
        self.flush()

    def flush(self) -> bool:
        """Write the pending records; returns whether all of them were written."""
        try:
            self._write()
        except OSError:
            return False  # they stay pending, in order; `close` raises if they still are
        return True

    def sync(self) -> None:
        """Write the pending records and fsync. Raises OSError if some can't be written."""
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """As `sync`, then close the file."""
        try:
            self.sync()
        finally:  # the system reuses the number for another file
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _write(self) -> None:
        with self._lock:
            while self._pending:
                record = self._pending[0]
                written = os.write(self._descriptor, record)
                self._size += written
                if written == len(record):
                    self._pending.popleft()
                else:  # the disk filled up: the rest of the record is written next
                    self._pending[0] = record[written:]


@dataclass(frozen=True)
class FileMark:
    """A position in an append-only file, with a checksum of the bytes directly before it."""

    offset: int = 0
    checked: int = 0  # number of bytes that the checksum covers
    checksum: str = ""

    def after(self, data: bytes) -> FileMark:
        """The position after `data`, appended at this position."""
        if not (tail := data[-TAIL_BYTES:]):
            return self
        return FileMark(self.offset + len(data), len(tail), xxhash.xxh3_128_hexdigest(tail))

    def fits(self, path: Path) -> bool:
        """Whether a file reaches this position and has these bytes before it."""
        try:
            with open(open_regular(path), "rb") as file:
                file.seek(self.offset - self.checked)
                tail = file.read(min(self.checked, TAIL_BYTES))
        except OSError:
            tail = b""
        return FileMark(self.offset - self.checked).after(tail) == self


def continue_file(path: Path, offset: int, data: bytes) -> None:
    """Keep the first `offset` bytes of a file, then write `data`, durably."""
    if not offset:
        replace_bytes(path, [data])
        return
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_records(
    path: Path, offset: int = 0, *, kind: Kind = OBJECT, tell: Callable[[str], object] = len
) -> list[dict[str, Any]]:
    """The records of a kind in a file from an offset on; [] if there is no file. `tell` is called
    with a message about other lines."""
    try:
        data = read_file(path, offset)
    except FileNotFoundError:
        return []
    return parse_records(data, kind, lambda why: tell(f"{display_path(path)}: {why}"))


def last_records(path: Path, number: int, kind: Kind = OBJECT) -> list[dict[str, Any]]:
    """The records of a kind in the last `number` lines of a file; [] if it can't be read."""
    data = b""
    with contextlib.suppress(OSError), open(open_regular(path), "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin and data.count(b"\n") <= number and len(data) < LARGEST_TAIL:
            size = min(begin, TAIL_BYTES)
            begin -= size
            file.seek(begin)
            data = file.read(size) + data
    return parse_records(b"\n".join(data.splitlines()[-number:]), kind)


def sample_records(path: Path, kind: Kind = OBJECT) -> list[dict[str, Any]]:
    """Records of a kind evenly spaced in a file, the first included; all of a small file."""
    with open(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= SAMPLES * SAMPLE_BYTES:
            return read_records(path, kind=kind)
        found = []
        for number in range(SAMPLES):
            file.seek(number * size // SAMPLES)
            lines = file.read(SAMPLE_BYTES).split(b"\n")
            whole = lines[number > 0 : -1]  # all samples but the first begin within a line
            found += parse_records(b"".join(whole[:1]), kind)
        return found


def newest_step(path: Path) -> int:
    """The largest `step` in the last 100 lines of a file; 0 if there is none."""
    return max((line["step"] for line in last_records(path, 100, WITH_STEP)), default=0)


def parse_records(
    data: bytes, kind: Kind = OBJECT, tell: Callable[[str], object] = len
) -> list[dict[str, Any]]:
    """The records of a kind in lines. `tell` is called with a message about other lines."""
    found, others = [], list[str]()
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = parse_json(line)
            why = kind.problem(record)
        except ValueError as error:
            why = str(error)
        if why:
            others.append(f"line {number}: {why}")
        else:
            found.append(record)
    if others:
        tell(f"{len(others)} of its lines can't be used, the first is {others[0]}")
    return found


def _open(path: Path) -> int:
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
