"""What a rank is doing right now, in memory that another process can read when this one stands."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer import processes

NAME = "trainer-pulse"
LEAVING = frozenset(("reading", "data", "forward", "backward", "evaluate"))
"""Points at which the main thread may leave: the state is that of the last boundary."""

POINTS = (
    "", "build", "warm-up", "start", "restore", "reading", "data", "forward", "backward",
    "optimizer", "step-end", "evaluate", "save-begin", "save-mid", "save-end",
)  # fmt: skip
"""All of them. A point and its step are one word in memory, which nobody reads half written: the
step times their count, plus the point's number among them."""

_NUMBERS = {point: number for number, point in enumerate(POINTS)}
_COUNT, _SAVING = len(POINTS), POINTS.index("save-begin")
"""How many; and the number from which on they are points of the checkpoint's writer."""
_PLACES = struct.Struct("=qdqd")
_MAIN, _WRITER = 0, 2
"""Where a place begins, in words of 8 bytes: point and step, then when it was passed."""


@dataclass(frozen=True)
class Place:
    """A point that was passed."""

    point: str
    step: int
    at_s: float
    """When, on the monotonic clock of the host."""


class Pulse:
    """The last points that the main thread and the checkpoint's writer have passed.

    A point costs half a microsecond: no lock, no call into the system.

    Args:
        clock: seconds, monotonic, of the host.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        descriptor = -1
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(NAME)
            os.ftruncate(descriptor, _PLACES.size)
        # Its own copy of the descriptor is found in /proc/PID/fd by its name, while it lives.
        self._memory = memoryview(mmap.mmap(descriptor, _PLACES.size))
        if descriptor >= 0:
            os.close(descriptor)
        self._words, self._times = self._memory.cast("q"), self._memory.cast("d")
        self._clock, self._step = clock, 0
        self.lost = False
        """Set by who sees that a peer is gone: the main thread is to leave at the next point."""
        self.beat("build", 0)

    def beat(self, point: str, step: int | None = None, epoch: int = 0) -> None:
        """The point is passed; `step` None: the step it was.

        Raises:
            RuntimeError: a peer is gone, and the main thread may leave here.
        """
        number = _NUMBERS[point]
        if number >= _SAVING:
            self._times[_WRITER + 1] = self._clock()
            self._words[_WRITER] = (step or 0) * _COUNT + number
            return
        if step is not None:
            self._step = step
        # The time first: who looks in between may see a point as newer than it is, never as older.
        self._times[_MAIN + 1] = self._clock()
        self._words[_MAIN] = self._step * _COUNT + number
        if self.lost and point in LEAVING:
            raise RuntimeError(f"connection closed by peer, seen at {point} of step {self._step}")

    def rest(self) -> None:
        """The checkpoint's writer has nothing more to do."""
        self._words[_WRITER] = 0

    @property
    def main(self) -> Place:
        """Where the main thread is."""
        return _places(self._memory)[0]

    @property
    def writer(self) -> Place:
        """Where the checkpoint's writer is; without a point it is nowhere."""
        return _places(self._memory)[1]


def read(pid: int) -> tuple[Place, Place] | None:
    """Main thread's and writer's places of another process of this host, also of a stopped one."""
    data = processes.read_memory(pid, NAME)
    return None if data is None or len(data) < _PLACES.size else _places(data)


def _places(memory: bytes | memoryview) -> tuple[Place, Place]:
    main, main_s, writer, writer_s = _PLACES.unpack_from(memory)
    return _place(main, main_s), _place(writer, writer_s)


def _place(word: int, at_s: float) -> Place:
    step, number = divmod(word, _COUNT)
    return Place(POINTS[number], step, at_s)
