"""Why a thread of this rank doesn't get on: whom it waits for, and whether it does anything."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType

from trainer.processes import Activity
from trainer.pulse import Place

PEERS, WRITER, PERSON, NOBODY = "peers", "writer", "person", ""
"""Whom a main thread may wait for."""

_COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/", "torch/nn/modules/_functions.py",
                "torch/autograd/graph.py", "trainer/world.py", "trainer/handshake.py")
"""Where a thread is that waits for other ranks, in a backward too: parts of paths."""

_WAITING = ("read_sums", "wait_for_peers")
"""Functions outside of these that wait for other ranks, or for the device."""

_DEPTH = 8


def waits_for(frame: FrameType | None) -> str:
    """Whom a thread waits for, from the innermost of its frames."""
    places: list[tuple[str, str]] = []
    while frame is not None and len(places) < _DEPTH:
        code = frame.f_code
        places.append((code.co_filename.replace(os.sep, "/"), code.co_name))
        frame = frame.f_back
    if not places:
        return NOBODY
    file, function = places[0]
    if any(f"/{part}" in file for part in _COLLECTIVES) or function in _WAITING:
        return PEERS
    if any(f.endswith("trainer/checkpoint.py") and name in ("finish_copy", "finish_pending",
                                                            "abandon") for f, name in places):
        return WRITER
    if any(f.endswith(("/pdb.py", "/bdb.py")) for f, _ in places):
        return PERSON
    return NOBODY


class Doing:
    """The main thread: whom it waits for, and when this process was last seen to do anything."""

    def __init__(self, thread: int, clock: Callable[[], float]) -> None:
        self._thread, self._clock = thread, clock
        self._activity: Activity | None = None
        self._busy_s = -math.inf

    def look(self, place: Place, closely: bool) -> tuple[str, float]:
        """(whom it waits for, when something was done); looked at only `closely`."""
        if not closely:
            self._activity = None
            return NOBODY, place.at_s
        if self._activity is None:
            self._activity = Activity(os.getpid(), clock=self._clock)
        elif self._activity.seen():
            self._busy_s = self._clock()
        return waits_for(sys._current_frames().get(self._thread)), self._busy_s


class Writing:
    """The checkpoint's writer: where it is, and when its thread was last seen to do anything."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since_s = self._busy_s = 0.0
        self._activity: Activity | None = None

    def look(self, told: Place, step: int, limit_s: float) -> tuple[Place, float]:
        """(its place, for how long it has done nothing), of the save of a step that it is at."""
        now = self._clock()
        if step != self._step:
            self._step, self._since_s, self._activity = step, now, None
        place = told if told.point and told.step == step else Place(
            "save-begin", step, self._since_s)
        if now - place.at_s > limit_s / 4:
            if self._activity is None:
                self._activity = Activity(os.getpid(), thread=_writer(), clock=self._clock)
            elif self._activity.seen():
                self._busy_s = now
        return place, now - max(place.at_s, self._busy_s)


def _writer() -> int | None:
    """The system's number of the writer's thread."""
    return next((t.native_id for t in threading.enumerate()
                 if t.name.startswith("checkpoint-writer")), None)
