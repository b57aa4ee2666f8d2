"""A file that grows by whole records. A full disk delays records, and never drops or tears one."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path


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
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()  # a writer thread has events of its own
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)

    def append(self, record: bytes) -> None:
        """Append a record, after those that wait."""
        with self._lock:
            if not self._waiting:
                with contextlib.suppress(OSError):
                    record = record[os.write(self._descriptor, record):]
            if record:
                self._waiting.append(record)

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
            OSError: records are left that can't be written.
        """
        try:
            self.sync()
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        with self._lock:
            while self._waiting:
                record = b"".join(self._waiting)
                written = os.write(self._descriptor, record)
                # Where the disk filled within it, the rest continues it.
                self._waiting = [record[written:]] if written < len(record) else []
