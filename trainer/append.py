"""A file that grows by whole records. A full disk delays records, and never drops or tears one."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path


class AppendFile:
    """Appends bytes in the order given, each record in one write where the disk takes it.

    What can't be written waits in memory for the next call. A killed process loses what waits.

    Args:
        pause_s: records that come sooner than this after a write wait too, to be written together.
        clock: seconds, monotonic.
    """

    def __init__(self, path: Path, *, pause_s: float = 0.0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting: list[bytes] = []
        self._pause_s, self._clock, self._written_s = pause_s, clock, -math.inf
        self._lock = threading.Lock()  # a writer thread has events of its own
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)

    def append(self, record: bytes) -> None:
        """Append a record, after those that wait."""
        if self._pause_s:
            now = self._clock()
            if now - self._written_s < self._pause_s:
                with self._lock:
                    self._waiting.append(record)
                return
            self._written_s = now
            self.flush()
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
