"""Proof at the start that the states of a stream bring back the samples that follow them.

A chain of processes, each forked before anything is read, reads the start of some lanes. The first
one reads it in one go; each of the others continues from the state that the one before it has
reached, as after a kill. All must read the same samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from trainer.data.map_dataset import begin_epoch
from trainer.data.sample_errors import SampleError
from trainer.data.stream_reader import LaneIterator, LanePosition, StreamSpec
from trainer.data.workers import call_in_child
from trainer.errors import ConfigError
from trainer.run.prepare import content

DEPTHS = (1, 7, 64, 300)
"""Numbers of samples of a lane after which its state is tried, rounded up to whole windows."""
AFTER = 20
"""Number of samples that are compared after the last state."""
FEW = 8
"""Number of samples by which the place of a wrong state is recognized."""
READ_S, ALL_S = 0.5, 3.0
"""Limits in seconds of the first reading, and of all: of a slow stream two windows are tried."""

Window = dict[int, list[str]]
"""Lane iterator → a digest of each of its samples."""
Marks = Mapping[int, LanePosition]


@dataclass
class Reading:
    """What a process has read: windows up to the limit, the end of the stream, or an error."""

    windows: list[Window] = field(default_factory=list)
    marks: dict[int, Marks] = field(default_factory=dict)
    """Number of windows → positions of the iterators after them."""
    kind: str = ""
    """The class of the source whose state is the position."""
    ended: bool = False
    error: str = ""
    state_error: str = ""


@dataclass(frozen=True)
class StreamProof:
    """What the states of a stream are worth."""

    kind: str = ""
    """The class of the source that has a state; "" if none has."""
    problem: str = ""
    """What a state brings back in place of the samples that follow; "" if it brings these back."""
    reproducible: bool = True
    """Whether another reading from the start gives the same samples (tried if there is no state
    or it has a problem)."""


def prove_stream(spec: StreamSpec, lanes: Sequence[int], *, daemon: bool) -> StreamProof:
    """Try the states of some lanes and the next one, of a data set that nothing has read yet.

    Args:
        daemon: as in the loader processes of the run, the data set can't start processes.

    Raises:
        ConfigError: the data set needs processes of its own.
        RuntimeError: see `call_in_child`.
    """
    began_s, size = time.monotonic(), spec.samples_per_window
    numbers = spec.iterators_of(sorted({*lanes, (lanes[-1] + 1) % spec.lanes}))
    depths = sorted({-(-depth // size) for depth in DEPTHS})

    def read(first: int, marks: Marks, end: int, keep: Collection[int] = (), *,
             limit_s: float = math.inf) -> Reading:
        return call_in_child(Reader(spec, numbers, first, marks, end, keep, limit_s),
                             daemon=daemon)

    straight = read(0, {}, depths[-1] + -(-AFTER // size), depths, limit_s=READ_S)
    if daemon and straight.error and not straight.windows:
        daemon = False
        if not read(0, {}, 1).error:
            raise ConfigError("--data.workers: the training stream can't be read in a loader "
                              f"process, only outside of one ({straight.error}); use "
                              "--data.workers 0.")
    total = len(straight.windows)
    problem = straight.state_error
    places = [place for place in straight.marks
              if straight.kind and place < total + straight.ended]
    marks = straight.marks[places[0]] if places else {}
    for place, end in zip(places, [*places[1:], total + straight.ended], strict=False):
        again = read(place, marks, end, (end,))
        problem = problem or _difference(spec, straight, again, place, end)
        if problem or end not in again.marks or time.monotonic() - began_s > ALL_S:
            break
        marks = again.marks[end]
    needs_start = not straight.kind or problem
    return StreamProof(kind=straight.kind, problem=problem, reproducible=not needs_start or (
        read(0, {}, total).windows == straight.windows))


@dataclass
class Reader:
    """Reads the windows of epoch 0 after number `first`, whose positions are `marks`, up to `end`,
    the end of the stream or the limit. `keep`: numbers of windows whose positions are returned, in
    addition to that of the last one of a stream that has ended."""

    spec: StreamSpec
    numbers: list[int]
    first: int
    marks: Marks
    end: int
    keep: Collection[int]
    limit_s: float
    iterators: list[LaneIterator] = field(default_factory=list)
    """Kept open at the end: closing them might wait for their threads."""

    def __call__(self) -> Reading:
        reading = Reading()
        try:
            begin_epoch(self.spec.dataset, 0, seed=self.spec.seed)
            self.iterators += [
                LaneIterator(self.spec, number=number, epoch=0, windows=self.first,
                             mark=self.marks.get(number, LanePosition()))
                for number in self.numbers]
            reading.kind = next((one.kind for one in self.iterators if one.kind), "")
            self._fill(reading)
        except SampleError as error:
            reading.error = str(error)
        return reading

    def _fill(self, reading: Reading) -> None:
        deadline_s, last = time.monotonic() + self.limit_s, dict[int, Marks]()
        for place in range(self.first + 1, self.end + 1):
            window = {one.number: [xxhash.xxh3_128(content(sample)).hexdigest()
                                   for _, sample in one.take()] for one in self.iterators}
            if not any(window.values()):
                reading.ended, reading.marks = True, reading.marks | last
                return
            reading.windows.append(window)
            try:
                last = {place: {one.number: one.mark(place) for one in self.iterators}}
            except SampleError as error:
                reading.state_error = str(error)
                return
            if place in self.keep:
                reading.marks |= last
            if time.monotonic() > deadline_s and len(reading.windows) > 1:
                return


def _difference(
    spec: StreamSpec, straight: Reading, again: Reading, place: int, end: int
) -> str:
    """What a reading after `place` windows has in place of the windows of the straight one."""
    expected, found = straight.windows[place:end], again.windows
    if found == expected and not again.error and not again.state_error:
        return ""
    size = spec.samples_per_window
    number = next((n for n in straight.windows[0]
                   if _samples(found, n) != _samples(expected, n)), spec.iterators_of([0])[0])
    where = f"of lane {number} " if spec.per_lane else ""
    what = (f"the state of {straight.kind} after {place * size} samples {where}of the training "
            "stream ")
    if error := again.error or again.state_error:
        return f"{what}can't be continued: {error}"
    every, got, rest = (_samples(windows, number)
                        for windows in (straight.windows, found, expected))
    right = next(i for i in range(len(every)) if got[i : i + 1] != rest[i : i + 1])
    if right == len(got):
        return f"{what}brings back only {right} of the samples that follow"
    if right == 0:
        some = got[:FEW]
        starts = [at for at in range(len(every)) if every[at : at + len(some)] == some]
        for start in sorted(starts, key=lambda at: abs(at - place * size))[:1]:
            return f"{what}continues at sample {start}"
    return f"{what}brings back another sample {place * size + right}"


def _samples(windows: list[Window], number: int) -> list[str]:
    return [digest for window in windows for digest in window.get(number, ())]
