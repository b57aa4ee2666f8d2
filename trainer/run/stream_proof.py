"""Proof at the start that the states of a stream bring back the samples that follow them.

A chain of processes, each forked before anything is read, reads the start of epochs 0 and 1 of some
lanes. The first one reads it in one go; each of the others continues from the state that the one
before it has reached, as after a kill. All must read the same samples.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from trainer.data.map_dataset import begin_epoch
from trainer.data.sample_errors import SampleError
from trainer.data.stream_reader import LaneIterator, LanePosition, Positions, StreamSpec
from trainer.data.workers import call_in_child
from trainer.errors import ConfigError
from trainer.run.proof import content

DEPTHS = ((1, 7, 64, 300, 2000), (1, 7))
"""Numbers of samples of a lane in epochs 0 and 1 after which its state is tried, rounded up to
whole windows."""
AFTER = 20
"""Number of samples that are compared after the last state."""
FEW = 8
"""Number of samples by which the place of a wrong state is recognized."""
READ_S, ALL_S = 0.5, 5.0
"""Limits in seconds of the first reading of an epoch, and of all: of a slow stream two windows are
tried."""
DIFFERS = "another reading of the training stream from its start gives other samples"

Window = dict[int, list[str]]
"""Lane iterator → a digest of each of its samples."""
Marks = dict[int, LanePosition]
Place = tuple[int, int]
"""Epoch, and number of its windows that are completed."""
Span = tuple[int, int, int]
"""Epoch, and numbers of its windows that are completed at the start and at the end."""


@dataclass
class Reading:
    """What a process has read: windows up to the limit, the end of the stream, or an error."""

    windows: tuple[list[Window], list[Window]] = field(default_factory=lambda: ([], []))
    """Those of epochs 0 and 1."""
    marks: Marks = field(default_factory=dict)
    """Positions of the iterators at the place that was to be kept."""
    kind: str = ""
    """The class of the source whose state is the position."""
    ended: bool = False
    """Whether epoch 0 has ended."""
    error: str = ""
    state_error: str = ""


@dataclass(frozen=True)
class StreamProof:
    """What the states of a stream are worth."""

    problem: str = ""
    """What a state brings back in place of the samples that follow; "" if it brings these back."""
    usable: bool = True
    """Whether the states can be saved and loaded at all."""
    unlike: str = ""
    """How another reading from the start of an epoch differs; "" if it gives the same samples."""
    tried: Sequence[int] = (0, 0)
    """Numbers of samples of epochs 0 and 1 after which a state was tried last."""
    ended: bool = True
    """Whether that was the end of epoch 0."""


def prove_stream(spec: StreamSpec, lanes: Sequence[int], *, daemon: bool) -> StreamProof:
    """Try the states of some lanes and the next one, of a data set that nothing has read yet. It
    can't start processes in a `daemon`, as in loader processes; ConfigError if it needs them."""
    deadline_s, size = time.monotonic() + ALL_S, spec.samples_per_window
    numbers = spec.iterators_of(sorted({*lanes, (lanes[-1] + 1) % spec.lanes}))
    depths = [sorted({-(-depth // size) for depth in some}) for some in DEPTHS]

    def read(*spans: Span, marks: Marks | None = None, keep: Place = (0, 1),
             limit_s: float = math.inf) -> Reading:
        return call_in_child(Reader(spec, numbers, spans, marks or {}, keep, limit_s),
                             daemon=daemon)

    straight = read(*((epoch, 0, some[-1] + -(-AFTER // size))
                      for epoch, some in enumerate(depths)), limit_s=READ_S)
    if daemon and straight.error and not straight.windows[0]:
        daemon = False
        if not read((0, 0, 1)).error:
            raise ConfigError("--data.workers: the training stream can't be read in a loader "
                              f"process, only outside of one ({straight.error}); use "
                              "--data.workers 0.")
    ends = len(straight.windows[0]), len(straight.windows[1])
    stop = ends[0] + straight.ended  # the window after the last one of an epoch must be empty
    last = {ends[0] - 1, ends[0]} if straight.ended else set()
    fresh = read((1, 0, ends[1]), keep=(1, depths[1][0])) if ends[1] else Reading()
    unlike = "" if fresh.windows[1] == straight.windows[1] else (
        "epoch 1 of the training stream has other samples in a process that has not read epoch 0: "
        "take what depends on the epoch from set_epoch()")
    problem, usable, tried = straight.state_error, not straight.state_error, [0, 0]
    chains = ((straight.marks, [
        *((0, place) for place in sorted({*depths[0], *last}) if 0 < place < stop),
        (1, ends[1]) if ends[1] else (0, stop)]),
        (fresh.marks, [(1, place) for place in sorted({*depths[1], ends[1]}) if place <= ends[1]]))
    for marks, chain in chains if straight.kind else ():
        for (epoch, first), to in itertools.pairwise(chain):
            if problem or (unlike if epoch else tried[0] and time.monotonic() > deadline_s):
                break
            same = epoch == to[0]
            spans = [(epoch, first, to[1])] if same else [(0, first, stop), (1, 0, to[1])]
            again = read(*spans, marks=marks, keep=to)
            problem = _difference(spec, straight, again, spans)
            usable, marks = not (again.error or again.state_error), again.marks
            tried[epoch] = first * size
    if (problem or not straight.kind) and (
            read((0, 0, ends[0])).windows[0] != straight.windows[0]):
        unlike = DIFFERS
    return StreamProof(problem=problem, usable=usable, unlike=unlike, tried=tried,
                       ended=straight.ended and tried[0] == ends[0] * size)


def remedies(*, usable: bool, unlike: str) -> str:
    """The ways on from a state with a problem, as a sentence."""
    own = ("Make load_state_dict() restore the exact position, buffers included" if usable else
           "Correct state_dict() and load_state_dict()")
    exact = f"equivalent, since {unlike}" if unlike else "exact"
    return (f"{own}; or use --data.stream-resume read-through (a restart reads the samples of its "
            f"epoch up to its position once more: {exact})" + ", or state (equivalent)" * usable
            + ".")


def reach(proofs: Sequence[StreamProof]) -> str:
    """How far the states of all ranks' lanes are right; "" if there are none, or a wrong one."""
    first, later = (min(depths) for depths in zip(*(proof.tried for proof in proofs), strict=True))
    if not first or any(proof.problem for proof in proofs):
        return ""
    end = "its end" if all(proof.ended for proof in proofs) else "not its end"
    return f"tried up to sample {first:,} of epoch 0 ({end})" + (
        f" and {later:,} of epoch 1" if later else "; no later epoch")


@dataclass
class Reader:
    """Reads the windows of some spans, the first of which begins at the positions `marks`, up to
    their ends, the end of the stream or the limit. `keep`: the place whose positions are returned.
    """

    spec: StreamSpec
    numbers: list[int]
    spans: Sequence[Span]
    marks: Marks
    keep: Place
    limit_s: float
    """For each span; two windows are read in any case, but no second span after twice this time."""
    iterators: list[LaneIterator] = field(default_factory=list)
    """Kept open at the end: closing them might wait for their threads."""

    def __call__(self) -> Reading:
        reading, began_s, marks = Reading(), time.monotonic(), self.marks
        try:
            for epoch, first, end in self.spans:
                if time.monotonic() - began_s > 2 * self.limit_s:
                    break
                begin_epoch(self.spec.dataset, epoch, seed=self.spec.seed)
                iterators = [
                    LaneIterator(self.spec, number=number, epoch=epoch, windows=first,
                                 mark=marks.get(number, LanePosition()))
                    for number in self.numbers]
                self.iterators += iterators
                reading.kind = next((one.kind for one in iterators if one.kind), "")
                self._fill(reading, iterators, epoch, range(first + 1, end + 1))
                marks = {}
                if reading.state_error:
                    break
        except SampleError as error:
            reading.error = str(error)
        return reading

    def _fill(self, reading: Reading, iterators: list[LaneIterator], epoch: int, places: range
              ) -> None:  # fmt: skip
        deadline_s, positions = time.monotonic() + self.limit_s, Positions(iterators)
        for place in places:
            window = {one.number: [xxhash.xxh3_128(content(sample)).hexdigest()
                                   for _, sample in one.take()] for one in iterators}
            if not any(window.values()):
                reading.ended = reading.ended or epoch == 0
                return
            reading.windows[epoch].append(window)
            kept = (epoch, place) == self.keep
            try:
                marks = positions.after(place, all_new=kept)
            except SampleError as error:
                reading.state_error = str(error)
                return
            if kept:
                reading.marks = marks
            if time.monotonic() > deadline_s and len(reading.windows[epoch]) > 1:
                return


def _difference(
    spec: StreamSpec, straight: Reading, again: Reading, spans: Sequence[Span]
) -> str:
    """What a reading of some spans has in place of the windows of the straight one."""
    error = again.error or again.state_error
    differing = [(epoch, first, straight.windows[epoch][first:end])
                 for epoch, first, end in spans
                 if again.windows[epoch] != straight.windows[epoch][first:end]]
    if not differing and not error:
        return ""
    began, size = spans[0], spec.samples_per_window
    epoch, first, expected = (differing or [(*began[:2], [])])[0]
    found = again.windows[epoch]
    number = next((n for n in straight.windows[0][0]
                   if _samples(found, n) != _samples(expected, n)), spec.iterators_of([0])[0])
    where = f"of lane {number} " * spec.per_lane + f"of epoch {began[0]} " * (began[0] > 0)
    what = (f"the state of {straight.kind} after {began[1] * size} samples {where}of the training "
            "stream ")
    if error:
        return f"{what}can't be continued: {error}"
    if epoch > began[0]:
        what += f"is no state for the next epoch: epoch {epoch} "
    got, rest = (_samples(windows, number) for windows in (found, expected))
    right = next(i for i in itertools.count() if got[i : i + 1] != rest[i : i + 1])
    if right == len(got):
        return f"{what}brings back only {right} of the samples that follow"
    if right:
        return f"{what}brings back another sample {first * size + right}"
    for other in (epoch, 1 - epoch):
        every, some = _samples(straight.windows[other], number), got[:FEW]
        starts = [at for at in range(len(every)) if every[at : at + len(some)] == some]
        if starts:
            start = min(starts, key=lambda at: abs(at - first * size))
            return f"{what}continues at sample {start}" + f" of epoch {other}" * (other != epoch)
    return f"{what}brings back another sample {first * size}"


def _samples(windows: list[Window], number: int) -> list[str]:
    return [digest for window in windows for digest in window.get(number, ())]
