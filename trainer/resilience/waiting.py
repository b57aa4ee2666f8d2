"""Whether a thread of this rank is at work, from the processor time and the bytes that it uses."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable

from trainer.distributed.waits import WaitsFor, waits_for
from trainer.resilience.processes import Activity
from trainer.resilience.progress_marks import Place
from trainer.telemetry.status import Phase


class MainThreadActivity:
    """The main thread: whom it waits for, and when this process last used the machine."""

    def __init__(self, thread: int, clock: Callable[[], float]) -> None:
        self._thread, self._clock = thread, clock
        self._activity: Activity | None = None
        self._busy_s = -math.inf

    def look(self, place: Place, closely: bool) -> tuple[WaitsFor, float]:
        """(whom it waits for, when it was last active); the system is asked only if `closely`."""
        if not closely:
            self._activity = None
            return WaitsFor.NOBODY, place.at_s
        if self._activity is None:
            self._activity = Activity(os.getpid(), clock=self._clock)
        elif self._activity.seen():
            self._busy_s = self._clock()
        frame = sys._current_frames().get(self._thread)
        return waits_for(self._thread, frame), self._busy_s


class WriterActivity:
    """The checkpoint writer: its place, and when its thread last used the machine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = self._busy_s = 0.0
        self._activity: Activity | None = None

    def look(self, mark: Place, step: int, limit_s: float) -> tuple[Place, float]:
        """(place of the writer, seconds without activity) in the save of this step.

        Args:
            mark: the last mark of the writer, perhaps of an earlier save.
        """
        now = self._clock()
        if step != self._step:
            self._step, self._since_s, self._activity = step, now, None
        place = mark if mark.point and mark.step == step else Place(
            Phase.SAVE_BEGIN, step, self._since_s)
        if now - place.at_s > limit_s / 4:
            if self._activity is None:
                self._activity = Activity(os.getpid(), thread=_writer(), clock=self._clock)
            elif self._activity.seen():
                self._busy_s = now
        return place, now - max(place.at_s, self._busy_s)


def _writer() -> int | None:
    """Thread id of the writer in the system."""
    return next((t.native_id for t in threading.enumerate()
                 if t.name.startswith("checkpoint-writer")), None)
