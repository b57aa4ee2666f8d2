"""Collate the lanes of a stream into micro-batches, in a loader worker or the rank's process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode, Loader
from torchdata.nodes.loader import LoaderIterator

from trainer import rng
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch, begin_epoch
from trainer.data.sample_errors import as_sample_error, this_worker, yield_items_and_error
from trainer.data.sampler import MicroBatchSpec
from trainer.errors import ConfigError
from trainer.storage.codec import decode, encode

Collate = Callable[[list[Any]], Any]
_OPEN, _COLLATE = -1, 1
_END = object()
CHEAP_S, STATE_SHARE = 1e-3, 0.01
"""States that take longer than this processor time are taken for at most this share of the time."""


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """A stream data set, and how it is split into numbered micro-batches.

    The stream is read by independent iterators: one per lane if the data set has `lane()`,
    otherwise a single one for all lanes.
    """

    dataset: Any
    lanes: int  # M, the number of micro-batches in a global batch
    micro_size: int
    seed: int
    collate: Collate = batches.collate
    whole: bool = False  # read a data set with `lane()` by its `__iter__` too
    limit: int | None = None  # samples of an epoch, over all iterators; those of the first windows
    read_through: bool = False
    """Ignore the states of sources: read from the start of the epoch up to a position."""

    @property
    def per_lane(self) -> bool:
        return hasattr(self.dataset, "lane") and not self.whole

    @property
    def iterators(self) -> int:
        return self.lanes if self.per_lane else 1

    @property
    def samples_per_window(self) -> int:
        """Samples that one iterator contributes to a window."""
        return self.lanes * self.micro_size // self.iterators

    def samples_of(self, iterator: int) -> float:
        """Largest number of samples that an iterator yields in an epoch."""
        if self.limit is None or not self.per_lane:
            return math.inf if self.limit is None else self.limit
        windows, rest = divmod(self.limit, self.lanes * self.micro_size)
        last = min(max(rest - iterator * self.micro_size, 0), self.micro_size)
        return windows * self.micro_size + last

    def iterators_of(self, lanes: Sequence[int]) -> list[int]:
        """Numbers of the iterators that read these lanes."""
        return list(lanes) if self.per_lane else [0]


@dataclass(frozen=True, kw_only=True)
class LanePosition:
    """Position of a lane iterator: after `windows` windows of its epoch."""

    windows: int = 0
    state: Any = None  # the state of the source, encoded (storage/codec.py); None if it has none
    ended: bool = False


class LaneIterator:
    """Reads an iterator of a data set window by window, with keyed random draws.

    Args:
        mark: the position to resume from; without a state, earlier samples are read and dropped.
        windows: completed windows of the epoch, at least `mark.windows`.
    """

    def __init__(self, spec: StreamSpec, *, number: int, epoch: int,
                 mark: LanePosition = LanePosition(), windows: int = 0) -> None:
        self.number = number
        self._spec, self._epoch = spec, epoch
        self._keys = (spec.seed, rng.SAMPLE, epoch, *((number,) if spec.per_lane else ()))
        self._place = 0
        self.ended = mark.ended
        self._draws = True  # whether the random generators are keyed before each sample
        self._generators: list[Any] = []
        self._stateful: Any = None
        """The iterator or the source, whichever has a state_dict, which is then the position."""
        self.kind = ""  # the class of the source that has a state_dict; "" if none has
        if mark.ended:
            return
        with self._named("opening"):
            self._generators = rng.find_generators(spec.dataset)
            self._key(_OPEN)
            source = spec.dataset
            if spec.per_lane:
                source = source.lane(number, spec.lanes)
            self._generators = rng.find_generators(spec.dataset, source)
            # Not by a Loader's own methods, which begin anew from a state at the end.
            self._iterator = LoaderIterator(source) if isinstance(source, Loader) else iter(source)
            if not spec.read_through:
                self._find_state(source)
            self._start(source, mark)
            self._draws = getattr(self._iterator, "draws", True) is not False
        while self._place < windows * spec.samples_per_window and not self.ended:
            self.take()

    def _find_state(self, source: Any) -> None:
        for holder in (self._iterator, source):
            if isinstance(holder, BaseNode) or (
                    hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")):
                self._stateful = holder
                named = type(source if hasattr(source, "state_dict") else holder)
                self.kind = f"{named.__module__}.{named.__qualname__}"
                return

    def _start(self, source: Any, mark: LanePosition) -> None:
        """Move the source to the state of a position; without one, leave it at its start."""
        state = decode(mark.state) if self._stateful is not None else None
        if state is not None:
            self._place = mark.windows * self._spec.samples_per_window
        elif not isinstance(source, BaseNode | Loader):
            return
        self._key(0)  # it reads the first samples, in threads, or those before the state again
        if isinstance(self._iterator, BaseNode):
            self._iterator.reset(state)
        else:
            self._stateful.load_state_dict(state)
            if self._stateful is not self._iterator:
                self._iterator = iter(source)  # a loaded state applies to the next iterator

    def take(self) -> list[tuple[int, Any]]:
        """The samples of the next window, each with its position in this iterator: fewer at the end
        of the stream, and none after it."""
        taken: list[tuple[int, Any]] = []
        size, limit = self._spec.samples_per_window, self._spec.samples_of(self.number)
        with self._named("reading"):
            while len(taken) < size and not self.ended:
                if self._draws:
                    self._key(self._place)
                sample = next(self._iterator, _END) if self._place < limit else _END
                if sample is _END:
                    self.ended = True
                else:
                    taken.append((self._place, sample))
                    self._place += 1
        return taken

    def mark(self, windows: int) -> LanePosition:
        """The current position, after `windows` windows of the epoch."""
        state = None
        if self._stateful is not None and not self.ended:
            with self._named("the state_dict() at"):
                state = encode(self._stateful.state_dict())
        return LanePosition(windows=windows, state=state, ended=self.ended)

    def _key(self, *place: int) -> None:
        rng.seed_all(*self._keys, *place, devices=False)
        if self._generators:
            rng.key(self._generators, *self._keys, *place)

    def _named(self, doing: str) -> AbstractContextManager[None]:
        lane = f" of lane {self.number}" if self._spec.per_lane else ""
        return as_sample_error(lambda: f"{doing} sample {self._place}{lane} of epoch {self._epoch} "
                                       "of the stream")


class Positions:
    """The positions of iterators that are read in turn. Large states are taken rarely: the samples
    since then are read again after a restart."""

    def __init__(self, iterators: Sequence[LaneIterator]) -> None:
        self._iterators, self._due_s = iterators, 0.0

    def after(self, windows: int, *, all_new: bool = False) -> dict[int, LanePosition]:
        """Iterator → its position after `windows` windows; without those that are left out."""
        due = all_new or time.monotonic() >= self._due_s
        began_s = time.thread_time()
        found = {one.number: one.mark(windows) for one in self._iterators if due or one.ended}
        if due and (cost_s := time.thread_time() - began_s) > CHEAP_S:
            self._due_s = time.monotonic() + cost_s / STATE_SHARE
        return found


def known_length(dataset: Any) -> int | None:
    """Number of samples; None for a stream without `__len__`, or whose `__len__` raises."""
    try:
        return len(dataset)
    except TypeError:
        if isinstance(dataset, IterableDataset):
            return None
        raise


def first_samples(dataset: Any, *, lanes: int, count: int, seed: int) -> list[Any]:
    """Up to `count` samples from the start of lane 0 of a new data set, in epoch 0."""
    begin_epoch(dataset, 0, seed=seed)
    lanes = lanes if hasattr(dataset, "lane") else 1
    spec = StreamSpec(dataset=dataset, lanes=lanes, micro_size=count, seed=seed)
    return [sample for _, sample in LaneIterator(spec, number=0, epoch=0).take()]


@dataclass(frozen=True)
class WindowPart:
    """What one process has read for a window, and its iterators' new positions after it."""

    micro_batches: list[MicroBatch]
    marks: dict[int, LanePosition]

    def pin_memory(self) -> WindowPart:
        """Called by the DataLoader."""
        return WindowPart([micro.pin_memory() for micro in self.micro_batches], self.marks)


class LaneReader(IterableDataset[WindowPart]):
    """Yields the micro-batches of some lanes, one `WindowPart` per window.

    Each iteration is the next epoch and never ends: only the ranks together know whether an epoch
    is over, so a lane that has ended yields stand-ins.

    Args:
        empty_slots: stand-ins to append to each window.
        epoch, windows, marks: the position where the first iteration begins.
    """

    def __init__(
        self, spec: StreamSpec, *, lanes: Sequence[int], empty_slots: int, epoch: int,
        windows: int, marks: Mapping[int, LanePosition], rank: int, worker: int | None,
    ) -> None:  # fmt: skip
        self._spec, self._lanes, self._empty_slots = spec, lanes, empty_slots
        self._position = (epoch, windows, dict(marks))
        self._rank, self._worker = rank, worker
        self._stand_in: list[tuple[int, Any]] = []
        """Samples of the last micro-batch of full size, or of the largest one so far."""

    def __iter__(self) -> Iterator[WindowPart]:
        parts = self._parts(*self._position)
        self._position = (self._position[0] + 1, 0, {})
        return yield_items_and_error(parts, rank=self._rank, worker=self._worker)

    def _parts(self, epoch: int, windows: int, marks: dict[int, LanePosition]
               ) -> Iterator[WindowPart]:  # fmt: skip
        begin_epoch(self._spec.dataset, epoch, seed=self._spec.seed)
        iterators = [LaneIterator(self._spec, number=number, epoch=epoch, windows=windows,
                                  mark=marks.get(number, LanePosition()))
                     for number in self._spec.iterators_of(self._lanes)]
        positions = Positions(iterators)
        while True:
            windows += 1
            taken: dict[int, list[tuple[int, Any]]] = {lane: [] for lane in self._lanes}
            for iterator in iterators:
                if self._spec.per_lane:
                    taken[iterator.number] = iterator.take()
                    continue
                for place, sample in iterator.take():
                    taken.setdefault(place % self._spec.lanes, []).append((place, sample))
            self._stand_in = max([*reversed(taken.values()), self._stand_in], key=len)
            micro_batches = [self._micro(epoch, lane, taken[lane]) for lane in self._lanes]
            micro_batches += [self._micro(epoch, -1, []) for _ in range(self._empty_slots)]
            yield WindowPart(micro_batches, positions.after(windows))

    def _micro(self, epoch: int, lane: int, taken: list[tuple[int, Any]]) -> MicroBatch:
        """A micro-batch with step 0; the rank's own process sets the real step."""
        spec = MicroBatchSpec(0, epoch, lane, False, tuple(place for place, _ in taken))
        places, samples = zip(*(taken or self._samples_of_stand_in(epoch)), strict=True)
        rng.seed_all(self._spec.seed, rng.SAMPLE, epoch, lane, places[0], _COLLATE, devices=False)
        with as_sample_error(f"collating samples {list(places)} of lane {lane} of epoch {epoch}"):
            return MicroBatch(spec, batches.collated(self._spec.collate, list(samples)))

    def _samples_of_stand_in(self, epoch: int) -> list[tuple[int, Any]]:
        """The samples of a real micro-batch; read from the start of the epoch, if this process has
        read none yet."""
        for number in range(self._spec.iterators):
            if not self._stand_in:
                taken = LaneIterator(self._spec, number=number, epoch=epoch).take()
                self._stand_in = taken[: self._spec.micro_size]
        if not self._stand_in:
            raise ConfigError(f'--task: dataset("train") has no sample in epoch {epoch}.')
        return self._stand_in


class StreamBatches(IterableDataset[MicroBatch]):
    """Yields a rank's share of the first `limit` (0: all) batches of a stream: batch n belongs to
    rank n mod W.

    Each rank reads the whole stream. All yield as many batches, some of them a stand-in at the end.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, seed: int, collate: Collate, rank: int,
        num_ranks: int, limit: int = 0,
    ) -> None:  # fmt: skip
        self._limit = limit
        self._spec = StreamSpec(dataset=dataset, lanes=1, micro_size=batch_size, seed=seed,
                                collate=collate, whole=True)
        self._rank, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[MicroBatch]:
        return yield_items_and_error(self._share(), rank=self._rank, worker=this_worker())

    def _share(self) -> Iterator[MicroBatch]:
        begin_epoch(self._spec.dataset, 0, seed=self._spec.seed)
        iterator = LaneIterator(self._spec, number=0, epoch=0)
        number, first = 0, list[tuple[int, Any]]()
        while (not self._limit or number < self._limit) and (taken := iterator.take()):
            first = first or taken
            if number % self._num_ranks == self._rank:
                yield self._batch(number, taken)
            number += 1
        if 0 < number % self._num_ranks <= self._rank:
            yield self._batch(-1, first)

    def _batch(self, number: int, taken: list[tuple[int, Any]]) -> MicroBatch:
        """A batch; -1 is the number of a stand-in."""
        places, samples = zip(*taken, strict=True)
        with as_sample_error(f"collating batch {number} of the stream"):
            batch = batches.collated(self._spec.collate, list(samples))
        return MicroBatch(MicroBatchSpec(0, 0, number, True, places * (number >= 0)), batch)
