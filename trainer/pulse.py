"""What a rank is doing right now, in memory that another process can read when this one stands."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer import processes

NAME = "trainer-pulse"
LEAVING = frozenset(("reading", "data", "forward", "backward", "evaluate"))
"""Points at which the main thread may leave: the state is that of the last boundary."""


@dataclass(frozen=True)
class Place:
    """A point that was passed."""

    point: str
    step: int
    at_s: float
    """When, on the monotonic clock of the host."""


class _Shared(ctypes.Structure):
    _fields_ = (
        ("point", ctypes.c_char * 16), ("step", ctypes.c_longlong), ("at_s", ctypes.c_double),
        ("writer_point", ctypes.c_char * 16), ("writer_step", ctypes.c_longlong),
        ("writer_at_s", ctypes.c_double),
    )  # fmt: skip


class Pulse:
    """The last points that the main thread and the checkpoint's writer have passed.

    A point costs a few attribute writes: no lock, no call into the system.

    Args:
        clock: seconds, monotonic, of the host.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        size, self.descriptor = ctypes.sizeof(_Shared), -1
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(NAME)  # found in /proc/PID/fd by its name
            os.ftruncate(self.descriptor, size)
        self._shared = _Shared.from_buffer(mmap.mmap(self.descriptor, size))
        self._clock = clock
        self.lost = False
        """Set by who sees that a peer is gone: the main thread is to leave at the next point."""
        self.beat("build", 0)

    def beat(self, point: str, step: int | None = None) -> None:
        """The point is passed; `step` None: the step it was.

        Raises:
            RuntimeError: a peer is gone, and the main thread may leave here.
        """
        shared = self._shared
        if point.startswith("save-"):
            shared.writer_point = point.encode()
            shared.writer_step = step or 0
            shared.writer_at_s = self._clock()
            return
        shared.point = point.encode()
        if step is not None:
            shared.step = step
        shared.at_s = self._clock()
        if self.lost and point in LEAVING:
            raise RuntimeError(f"connection closed by peer, seen at {point} of step {shared.step}")

    def rest(self) -> None:
        """The checkpoint's writer has nothing more to do."""
        self._shared.writer_point = b""

    @property
    def main(self) -> Place:
        """Where the main thread is."""
        return _places(self._shared)[0]

    @property
    def writer(self) -> Place:
        """Where the checkpoint's writer is; without a point it is nowhere."""
        return _places(self._shared)[1]


def read(pid: int) -> tuple[Place, Place] | None:
    """Main thread's and writer's places of another process of this host, also of a stopped one."""
    data = processes.read_memory(pid, NAME)
    if data is None or len(data) < ctypes.sizeof(_Shared):
        return None
    return _places(_Shared.from_buffer_copy(data))


def _places(shared: _Shared) -> tuple[Place, Place]:
    return (Place(shared.point.decode(), shared.step, shared.at_s),
            Place(shared.writer_point.decode(), shared.writer_step, shared.writer_at_s))
