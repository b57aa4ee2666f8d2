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
"""All of them; in memory a point is its number among them."""

_NUMBERS = {point: number for number, point in enumerate(POINTS)}
_SAVING = POINTS.index("save-begin")
"""From this number on they are points of the checkpoint's writer."""
_PLACE = struct.Struct("=qqd")
_POINT, _STEP, _AT = 0, 1, 2
"""The words of 8 bytes of the main thread's place; the writer's comes behind it."""
_SIZE = 2 * _PLACE.size


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
            os.ftruncate(descriptor, _SIZE)
        # Its own copy of the descriptor is found in /proc/PID/fd by its name, while it lives.
        self._memory = memoryview(mmap.mmap(descriptor, _SIZE))
        if descriptor >= 0:
            os.close(descriptor)
        self._words, self._times = self._memory.cast("q"), self._memory.cast("d")
        self._clock = clock
        self.lost = False
        """Set by who sees that a peer is gone: the main thread is to leave at the next point."""
        self.beat("build", 0)

    def beat(self, point: str, step: int | None = None, epoch: int = 0) -> None:
        """The point is passed; `step` None: the step it was.

        Raises:
            RuntimeError: a peer is gone, and the main thread may leave here.
        """
        number, words = _NUMBERS[point], self._words
        if number >= _SAVING:
            _PLACE.pack_into(self._memory, _PLACE.size, number, step, self._clock())
            return
        words[_POINT] = number
        if step is not None:
            words[_STEP] = step
        self._times[_AT] = self._clock()
        if self.lost and point in LEAVING:
            raise RuntimeError(f"connection closed by peer, seen at {point} of step {words[_STEP]}")

    def rest(self) -> None:
        """The checkpoint's writer has nothing more to do."""
        _PLACE.pack_into(self._memory, _PLACE.size, 0, 0, 0.0)

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
    return None if data is None or len(data) < _SIZE else _places(data)


def _places(memory: bytes | memoryview) -> tuple[Place, Place]:
    point, step, at_s = _PLACE.unpack_from(memory)
    writer_point, writer_step, writer_at_s = _PLACE.unpack_from(memory, _PLACE.size)
    return (Place(POINTS[point], step, at_s),
            Place(POINTS[writer_point], writer_step, writer_at_s))
