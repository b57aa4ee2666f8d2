"""A file that grows by whole records. A full disk delays records, and never drops or tears one; a
crash of the machine may, and whoever reads them passes over that.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 16
"""Of the end of a file: more than enough for one record."""


class Mark:
    """A number in a file of its own that survives the death of the process, at the cost of a store
    to memory: no call into the system. Its block is there before it is mapped, so that a disk which
    fills later can't take it away (unless its file system copies on write).
    """

    def __init__(self, path: Path, number: int) -> None:
        self._memory: mmap.mmap | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            text = b"%-15d\n" % number
            os.pwrite(descriptor, text, 0)
            os.fsync(descriptor)
            self._memory = mmap.mmap(descriptor, len(text))
        except OSError:
            os.truncate(descriptor, 0)  # a full disk: there is no mark
        finally:
            os.close(descriptor)

    @staticmethod
    def read(path: Path) -> int:
        """The number in a file; 0 where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_bytes())
        return 0

    def set(self, number: int) -> None:
        """Change it."""
        if self._memory is not None:
            self._memory[:] = b"%-15d\n" % number

    def close(self) -> None:
        """Close the file."""
        if self._memory is not None:
            self._memory.close()


class AppendFile:
    """Appends bytes in the order given, each record in one write where the disk takes it.

    What can't be written waits in memory for the next call. Nothing is buffered otherwise, so a
    killed process loses only what waits.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()  # a writer thread has events of its own
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size

    @property
    def damage(self) -> str:
        """What somebody else has done to the file since it was opened; "" for nothing."""
        mine = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except OSError:
            return "removed"
        if not os.path.samestat(mine, there):
            return "replaced"
        return "cut" if mine.st_size < self._size else ""

    def restore(self, *, others: bool = False) -> str:
        """Undo `damage` where that can be done: the open file still has what was removed or
        replaced, not what was cut off. Returns what was done to it.

        Args:
            others: they append to it as well, and what is there now is what one of them restored.

        Raises:
            OSError: it can't be written; the records go on being kept in the open file.
        """
        with self._lock:
            damage = self.damage
            if damage in ("removed", "replaced"):
                if damage == "removed" or not others:
                    self._put_back(anew=damage == "removed")
                new = _open(self._path)
                os.close(self._descriptor)
                self._descriptor = new
            self._size = os.fstat(self._descriptor).st_size
            return damage

    def _put_back(self, *, anew: bool) -> None:
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        aside.unlink(missing_ok=True)
        try:
            copy, place = _open(aside), 0
            try:
                while part := os.pread(self._descriptor, 1 << 20, place):
                    place += os.write(copy, part)
                os.fsync(copy)
            finally:
                os.close(copy)
            if anew:
                with contextlib.suppress(FileExistsError):  # another process was faster
                    os.link(aside, self._path)
            else:
                aside.replace(self._path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)

    def append(self, record: bytes) -> None:
        """Append a record, after those that wait."""
        self._waiting.append(record)
        self.flush()

    def flush(self) -> bool:
        """Write what waits; whether all of it is written."""
        try:
            self._write()
        except OSError:
            return False  # kept in order; `close` raises if it stays so
        return True

    def sync(self) -> None:
        """Write what waits, and make it durable.

        Raises:
            OSError: records are left that can't be written.
        """
        self._write()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Write what waits, make it durable, and close.

        Raises:
            OSError: records are left that can't be written; or it is closed already.
        """
        try:
            self.sync()
        finally:
            descriptor, self._descriptor = self._descriptor, -1  # soon the number of another file
            os.close(descriptor)

    def _write(self) -> None:
        with self._lock:
            while self._waiting:
                record = self._waiting[0]
                written = os.write(self._descriptor, record)
                self._size += written
                if written == len(record):
                    self._waiting.popleft()
                else:  # the disk filled within it: the rest continues it
                    self._waiting[0] = record[written:]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line, without what is torn or something else; none where
    there is no file."""
    return records(path.read_bytes()) if path.exists() else []


def newest_step(path: Path) -> int:
    """The largest `step` among the last records of a file; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            found = records(file.read())
    except OSError:
        return 0
    return max((s for r in found if isinstance(s := r.get("step"), int)), default=0)


def records(data: bytes) -> list[dict[str, Any]]:
    """Those in some bytes of such a file."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
