"""Progress marks: the points of a run that a rank passes. The last one of each thread is in shared
memory, where another process can read it even while this one is stopped."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainer.storage import processes
from trainer.telemetry.status import Phase, Status

NAME = "trainer-progress"  # name of the memory file, by which another process finds it
LEAVING = frozenset((Phase.READING, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE))
"""Marks at which the main thread may leave: the state is that of the last step boundary."""

POINTS = (
    None, Phase.BUILD, Phase.WARM_UP, Phase.START, Phase.RESTORE, Phase.READING, Phase.DATA,
    Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END, Phase.EVALUATE, Phase.SAVE,
    Phase.SAVE_BEGIN, Phase.SAVE_MID, Phase.SAVE_END,
)
"""All marks by number. A mark and its step are one word in memory, so that no reader sees half of
it: the step times the number of marks, plus the mark's number."""
_NUMBERS = {point: number for number, point in enumerate(POINTS)}
_COUNT, _SAVING = len(POINTS), POINTS.index(Phase.SAVE_BEGIN)  # from there on the writer's
_MAIN, _WRITER, _BYTES = 0, 2, 32
"""Offsets of the places in words of 8 bytes (one for mark and step, one for the time); size."""

Subscriber = Callable[[Phase, int, int], None]
"""Called at each mark with the mark, the step and the epoch; may raise, or end the process."""


@dataclass(frozen=True)
class Place:
    """The last mark of a thread."""

    point: Phase | None  # None: the thread is idle
    step: int
    at_s: float  # when it was passed, on the monotonic clock of the host


class ProgressMarks:
    """The last marks that the main thread and the checkpoint writer have passed; `status` receives
    those of the main thread. A mark costs less than a microsecond, without lock or system call."""

    def __init__(self, status: Status | None = None) -> None:
        descriptor = os.memfd_create(NAME)
        os.ftruncate(descriptor, _BYTES)
        # The mapping keeps its own descriptor: /proc/PID/fd shows it under NAME.
        self._memory = memoryview(mmap.mmap(descriptor, _BYTES))
        os.close(descriptor)
        self._words, self._times = self._memory.cast("q"), self._memory.cast("d")
        self._status, self._step = status or Status(), 0
        self._subscribers: list[Subscriber] = []
        self._peer_lost = False
        self.mark(Phase.BUILD)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` at each mark from now on, except in the warm-up."""
        self._subscribers.append(subscriber)

    def mark(self, point: Phase, step: int | None = None, epoch: int = 0) -> None:
        """Record that the calling thread passes a mark (default: of the previous one's step).
        Raises RuntimeError if a peer is gone and the main thread may leave here."""
        number = _NUMBERS[point]
        if number >= _SAVING:
            self._times[_WRITER + 1] = time.monotonic()
            self._words[_WRITER] = (step or 0) * _COUNT + number
        else:
            if step is not None:
                self._step = step
            self._pass(point, number)
            if self._peer_lost and point in LEAVING:
                raise RuntimeError(
                    f"connection closed by peer, seen at {point} of step {self._step}")
        for subscriber in self._subscribers:
            subscriber(point, self._step if step is None else step, epoch)

    def rehearse(self, point: Phase, step: int, epoch: int = 0) -> None:
        """Record a mark of the warm-up as such, for no subscriber."""
        self._step = step
        self._pass(point, _NUMBERS[Phase.WARM_UP])

    def _pass(self, point: Phase, number: int) -> None:
        # The time first: a reader in between sees a mark as newer than it is, never as older.
        self._times[_MAIN + 1] = time.monotonic()
        self._words[_MAIN] = self._step * _COUNT + number
        self._status.reach(point)

    def writer_is_idle(self) -> None:
        self._words[_WRITER] = 0

    def report_lost_peer(self) -> None:
        """Record that a peer is gone: the main thread leaves at the next mark of `LEAVING`."""
        self._peer_lost = True

    @property
    def main(self) -> Place:
        return _place(self._memory, _MAIN)

    @property
    def writer(self) -> Place:
        return _place(self._memory, _WRITER)


def read_marks(pid: int) -> tuple[Place, Place] | None:
    """Places of main thread and writer in another process of this host, also a stopped one."""
    if not (data := processes.read_memory(pid, NAME)):
        return None
    return _place(memoryview(data), _MAIN), _place(memoryview(data), _WRITER)


def _place(memory: memoryview, offset: int) -> Place:
    step, number = divmod(memory.cast("q")[offset], _COUNT)
    return Place(POINTS[number], step, memory.cast("d")[offset + 1])
