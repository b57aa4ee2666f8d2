"""Reading streams (`IterableDataset`) in numbered lanes, with keyed random draws.

A stream has no random access. It is split into M lanes, one per micro-batch of a global batch, so
that a sample's micro-batch depends neither on the number of ranks nor on that of loader workers.
If the data set has a method `lane(number, lanes)`, each lane is read separately (lane 2 of 4 could
be every fourth file). Otherwise sample i of the stream belongs to lane i mod M, and each reading
process reads the whole stream and keeps its own lanes.

Requirements on a data set:
- Each new iteration starts from the beginning.
- It does not split itself by rank or worker.
- Its order depends only on the seed of its construction and on `set_epoch(epoch)`; draws inside a
  lane are keyed by that lane.

If the iterator, or the object it iterates over, has `state_dict` and `load_state_dict` (torchdata's
protocol, with values that JSON can hold), a resumed run restores the position directly. Otherwise
it reads and drops the earlier samples: equally exact, but as slow as reading them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trainer import generators, rng
from trainer.data.map_dataset import begin_epoch
from trainer.data.sample_errors import named
from trainer.errors import ConfigError

_OPEN = -1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a stream is split into numbered micro-batches.

    The stream is read by independent iterators: one per lane if the data set has `lane()`,
    otherwise a single one for all lanes.
    """

    lanes: int
    """M, the number of micro-batches in a global batch."""
    micro_size: int
    per_lane: bool
    """Whether the data set has `lane()`."""

    @classmethod
    def of(cls, dataset: Any, *, lanes: int, micro_size: int) -> Cut:
        """The layout for a data set."""
        return cls(lanes=lanes, micro_size=micro_size, per_lane=hasattr(dataset, "lane"))

    @property
    def iterators(self) -> int:
        """Number of iterators."""
        return self.lanes if self.per_lane else 1

    @property
    def samples_per_window(self) -> int:
        """Samples that one iterator contributes to a window."""
        return self.lanes * self.micro_size // self.iterators

    def iterators_of(self, lanes: Sequence[int]) -> list[int]:
        """Numbers of the iterators that read these lanes."""
        return list(lanes) if self.per_lane else [0]

    def lane_of(self, iterator: int, place: int) -> int:
        """The lane of the sample at a position of an iterator."""
        return iterator if self.per_lane else place % self.lanes


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Position of a lane iterator: after `windows` windows of its epoch."""

    windows: int = 0
    state: Any = None
    """The `state_dict` of the data set's iterator, as JSON; None if it has none."""
    ended: bool = False


class Feed:
    """Reads an iterator of a data set window by window, with keyed random draws.

    Args:
        mark: the position to resume from; without a state, earlier samples are read and dropped.
        windows: completed windows of the epoch, at least `mark.windows`.

    Raises:
        SampleError: by any method, if the data set raises; names the position of the sample.
    """

    def __init__(
        self, dataset: Any, layout: Cut, *, number: int, seed: int, epoch: int, mark: Mark = Mark(),
        windows: int = 0,
    ) -> None:  # fmt: skip
        self.number = number
        self.first: Any = None
        """The first sample read; None before that."""
        self._layout, self._epoch = layout, epoch
        self._keys = (seed, rng.SAMPLE, epoch, *((number,) if layout.per_lane else ()))
        self._place, self._ended = 0, mark.ended
        self._generators: list[Any] = []
        self._holder: Any = None
        if mark.ended:
            return
        with self._named("opening"):
            self._generators = generators.kept_by(dataset)
            self._key(_OPEN)
            source = dataset.lane(number, layout.lanes) if layout.per_lane else dataset
            self._generators = generators.kept_by(dataset, source)
            self._iterator = iter(source)
            holders = (h for h in (self._iterator, source) if _is_stateful(h))
            self._holder = next(holders, None)
            if mark.state is not None and self._holder is not None:
                self._holder.load_state_dict(mark.state)
                if self._holder is not self._iterator:
                    self._iterator = iter(source)  # a loaded state applies to the next iterator
                self._place = mark.windows * layout.samples_per_window
        while self._place < windows * layout.samples_per_window and not self._ended:
            self.take()

    def take(self) -> list[tuple[int, Any]]:
        """Read the samples of the next window, each with its position in this iterator.

        Returns fewer samples at the end of the stream, and none after it.
        """
        taken: list[tuple[int, Any]] = []
        while len(taken) < self._layout.samples_per_window and not self._ended:
            self._key(self._place)
            with self._named("reading"):
                try:
                    taken.append((self._place, next(self._iterator)))
                except StopIteration:
                    self._ended = True
                    break
            self._place += 1
        if taken and self.first is None:
            self.first = taken[0][1]
        return taken

    def mark(self, windows: int) -> Mark:
        """The current position, after `windows` windows of the epoch."""
        state = None
        if self._holder is not None and not self._ended:
            with self._named("the state_dict of"):
                # Converted through JSON: the form in which it is restored, and a copy that later
                # reads don't change.
                live = self._holder.state_dict()
                if windows <= 1 and (key := _odd_key(live)) is not None:
                    raise TypeError(f"it has the key {key!r}, which is not a string; the state is "
                                    "saved as JSON, which would restore the key as a string")
                state = json.loads(json.dumps(live))
        return Mark(windows=windows, state=state, ended=self._ended)

    def _key(self, *place: int) -> None:
        rng.key_generators(*self._keys, *place, devices=False)
        if self._generators:
            generators.key(self._generators, *self._keys, *place)

    def _named(self, doing: str) -> named:
        lane = f" of lane {self.number}" if self._layout.per_lane else ""
        return named(f"{doing} sample {self._place}{lane} of epoch {self._epoch} of the stream")


def known_length(dataset: Any) -> int | None:
    """Number of samples; None for a stream without `__len__`, or whose `__len__` raises TypeError.

    Raises:
        ConfigError: `__len__` doesn't return a number of samples.
    """
    stream = isinstance(dataset, IterableDataset)
    try:
        return len(dataset)
    except (TypeError, ValueError, OverflowError):
        if stream and not hasattr(type(dataset), "__len__"):
            return None
        try:
            length = type(dataset).__len__(dataset)
        except (TypeError, AttributeError):
            if stream:
                return None
            raise
    raise ConfigError(f"--task: __len__ of the data set {type(dataset).__name__} returned "
                      f"{length!r} ({type(length).__name__}); return the number of samples, an "
                      "int of 0 or more.")


def first_samples(dataset: Any, *, lanes: int, count: int, seed: int) -> list[Any]:
    """Up to `count` samples from the start of lane 0 of a new data set, in epoch 0."""
    begin_epoch(dataset, 0, seed=seed)
    per_lane = hasattr(dataset, "lane")
    layout = Cut(lanes=lanes if per_lane else 1, micro_size=count, per_lane=per_lane)
    return [s for _, s in Feed(dataset, layout, number=0, seed=seed, epoch=0).take()]


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _odd_key(value: Any) -> Any:
    """A dict key inside `value` that is not a string; None if there is none."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        return odd if odd is not None else _odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((key for key in map(_odd_key, value) if key is not None), None)
    return None
