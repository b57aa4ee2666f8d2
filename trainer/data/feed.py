"""Feeds: a stream cut into numbered lanes and read in order, each random draw keyed by its place.

A stream is an `IterableDataset`: it has no random access. It is cut into M lanes, one for each
micro-batch of a global batch, so that neither ranks nor loader workers move a sample. With a method
`lane(number, lanes)` a data set reads single lanes itself (lane 2 of 4 might be each fourth file);
without, sample i of the stream belongs to lane i mod M, and each process that reads reads all of
it, to keep its part.

What a data set has to bear: iterating anew starts anew; it divides itself neither by rank nor by
worker; what decides the order follows from the seed that it was made with and `set_epoch(epoch)`,
since a draw inside a lane is keyed by that lane. Where an iterator or what it iterates over has
`state_dict` and `load_state_dict` (as torchdata has it; in JSON), a resumed run jumps to the place;
otherwise it reads through the samples before it, which is as exact and takes as long as reading.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from trainer import generators, rng
from trainer.data.bad import named
from trainer.data.reading import begin_epoch
from trainer.errors import ConfigError

_OPEN = -1


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a stream becomes numbered micro-batches.

    It is read through feeds: iterators that go their way alone. There is one for each lane where
    the data set reads lanes itself (`own`), otherwise one for all of them.
    """

    lanes: int
    """M, the micro-batches of a global batch."""
    micro_size: int
    own: bool

    @classmethod
    def of(cls, dataset: Any, *, lanes: int, micro_size: int) -> Cut:
        """The cut that suits a data set."""
        return cls(lanes=lanes, micro_size=micro_size, own=hasattr(dataset, "lane"))

    @property
    def feeds(self) -> int:
        """How many iterators there are."""
        return self.lanes if self.own else 1

    @property
    def take(self) -> int:
        """Samples that a feed gives for one window."""
        return self.lanes * self.micro_size // self.feeds

    def feeds_of(self, lanes: Sequence[int]) -> list[int]:
        """The feeds that these lanes come from."""
        return list(lanes) if self.own else [0]

    def lane_of(self, feed: int, place: int) -> int:
        """The lane of a feed's sample."""
        return feed if self.own else place % self.lanes


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a feed stands: after `windows` windows of its epoch."""

    windows: int = 0
    state: Any = None
    """What its iterator's `state_dict` gave, as JSON; None where it has none."""
    ended: bool = False


class Feed:
    """An iterator of a data set, read window by window with each draw keyed.

    Args:
        mark: where it goes on; with no state in it the samples before are read through.
        windows: windows of the epoch that are done, `mark.windows` or more.

    Raises:
        SampleError: from each method: what the data set raised, with the sample's place.
    """

    def __init__(
        self, dataset: Any, cut: Cut, *, number: int, seed: int, epoch: int, mark: Mark = Mark(),
        windows: int = 0,
    ) -> None:  # fmt: skip
        self.number = number
        self.first: Any = None
        """The first sample that it gave; None if it has given none."""
        self._cut, self._epoch = cut, epoch
        self._keys = (seed, rng.SAMPLE, epoch, *((number,) if cut.own else ()))
        self._place, self._ended = 0, mark.ended
        self._generators: list[Any] = []
        self._holder: Any = None
        if mark.ended:
            return
        with self._named("opening"):
            self._generators = generators.kept_by(dataset)
            self._key(_OPEN)
            source = dataset.lane(number, cut.lanes) if cut.own else dataset
            self._generators = generators.kept_by(dataset, source)
            self._iterator = iter(source)
            holders = (h for h in (self._iterator, source) if _is_stateful(h))
            self._holder = next(holders, None)
            if mark.state is not None and self._holder is not None:
                self._holder.load_state_dict(mark.state)
                if self._holder is not self._iterator:
                    self._iterator = iter(source)  # an object's state shows in its next iterator
                self._place = mark.windows * cut.take
        while self._place < windows * cut.take and not self._ended:
            self.take()

    def take(self) -> list[tuple[int, Any]]:
        """The next window's samples, each with its place in the feed: fewer where the feed ends,
        none after that."""
        taken: list[tuple[int, Any]] = []
        while len(taken) < self._cut.take and not self._ended:
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
        """Where it stands now, after `windows` windows of the epoch."""
        state = None
        if self._holder is not None and not self._ended:
            with self._named("the state_dict of"):
                # Through JSON: as it will come back, and apart from what goes on changing.
                told = self._holder.state_dict()
                if windows <= 1 and (key := _odd_key(told)) is not None:
                    raise TypeError(f"it has the key {key!r}, and JSON, as which it is kept, has "
                                    "texts only: it would come back as one")
                state = json.loads(json.dumps(told))
        return Mark(windows=windows, state=state, ended=self._ended)

    def _key(self, *place: int) -> None:
        rng.key_generators(*self._keys, *place, devices=False)
        if self._generators:
            generators.key(self._generators, *self._keys, *place)

    def _named(self, doing: str) -> named:
        lane = f" of lane {self.number}" if self._cut.own else ""
        return named(f"{doing} sample {self._place}{lane} of epoch {self._epoch} of the stream")


def known_length(dataset: Any) -> int | None:
    """Samples in a data set; None for a stream without `__len__`, or whose own raises a TypeError.

    Raises:
        ConfigError: `__len__` gives something else than a number of samples.
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
    raise ConfigError(f"--task: __len__ of the data set {type(dataset).__name__} gives {length!r} "
                      f"({type(length).__name__}); let it give the number of samples, a whole "
                      "number (int) of 0 or more.")


def first_samples(dataset: Any, *, lanes: int, count: int, seed: int) -> list[Any]:
    """Up to `count` samples from the beginning of lane 0 of a fresh data set, in epoch 0."""
    begin_epoch(dataset, 0, seed=seed)
    own = hasattr(dataset, "lane")
    cut = Cut(lanes=lanes if own else 1, micro_size=count, own=own)
    return [s for _, s in Feed(dataset, cut, number=0, seed=seed, epoch=0).take()]


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _odd_key(value: Any) -> Any:
    """A key in it that is no text; None if there is none."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        return odd if odd is not None else _odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((key for key in map(_odd_key, value) if key is not None), None)
    return None
