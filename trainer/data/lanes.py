"""The micro-batches of some lanes of a stream, made where it is read: a loader worker, or here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer import rng
from trainer.data import batch as batches
from trainer.data.bad import handing_over, named, this_worker
from trainer.data.feed import Cut, Feed, Mark
from trainer.data.reading import Micro, begin_epoch
from trainer.data.sampler import Slot, block
from trainer.errors import ConfigError

Collate = Callable[[list[Any]], Any]
_COLLATE = 1


@dataclass(frozen=True)
class Part:
    """What one process has read for a window: micro-batches, and where its feeds then stand."""

    micros: list[Micro]
    marks: dict[int, Mark]

    def pin_memory(self) -> Part:
        """Called by the DataLoader's pinning."""
        return Part([micro.pin_memory() for micro in self.micros], self.marks)


class LaneReader(IterableDataset[Part]):
    """The micro-batches of some lanes, one `Part` a window; in a loader worker: its share of them.

    Each iteration is the next epoch and has no end: whether an epoch is over is seen only where all
    lanes come together, and until then a lane that has ended gives empty micro-batches.

    Args:
        lanes: this rank's.
        empty_slots: empty micro-batches at the end of each window.
        epoch, windows, marks: where the first iteration begins.
        rank: told in errors.
    """

    def __init__(
        self, dataset: Any, cut: Cut, *, lanes: Sequence[int], empty_slots: int, seed: int,
        collate: Collate, epoch: int, windows: int, marks: Mapping[int, Mark], rank: int = 0,
    ) -> None:  # fmt: skip
        self._dataset, self._cut, self._seed, self._collate = dataset, cut, seed, collate
        self._lanes, self._empty_slots = lanes, empty_slots
        self._first = (epoch, windows, dict(marks))
        self._iterations = 0
        self._rank = rank
        self._worker: int | None = None
        self._form: Any = None
        self._own_memory = batches.OwnMemory()

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        if info is not None:
            count, self._worker = len(self._lanes), info.id
            self._lanes = [self._lanes[i] for i in block(count, info.id, info.num_workers)]
            self._empty_slots *= info.id == info.num_workers - 1
            # A data set that divides itself by worker would leave out what is not its part, and a
            # worker's later epochs are to find the division done.
            torch.utils.data._utils.worker._worker_info = None
        epoch, windows, marks = self._first
        if self._iterations:
            epoch, windows, marks = epoch + self._iterations, 0, {}
        self._iterations += 1
        parts = self._parts(epoch, windows, marks)
        return handing_over(parts, rank=self._rank, worker=self._worker)

    def _parts(self, epoch: int, windows: int, marks: dict[int, Mark]) -> Iterator[Part]:
        begin_epoch(self._dataset, epoch, seed=self._seed)
        feeds = [
            Feed(self._dataset, self._cut, number=number, seed=self._seed, epoch=epoch,
                 mark=marks.get(number, Mark()), windows=windows)
            for number in self._cut.feeds_of(self._lanes)
        ]  # fmt: skip
        while True:
            windows += 1
            taken: dict[int, list[tuple[int, Any]]] = {lane: [] for lane in self._lanes}
            for feed in feeds:
                for place, sample in feed.take():
                    lane = self._cut.lane_of(feed.number, place)
                    if lane in taken:
                        taken[lane].append((place, sample))
                if self._form is None:
                    self._form = feed.first
            micros = [self._micro(epoch, lane, samples) for lane, samples in taken.items()]
            micros += [self._micro(epoch, -1, []) for _ in range(self._empty_slots)]
            yield Part(micros, {feed.number: feed.mark(windows) for feed in feeds})

    def _micro(self, epoch: int, lane: int, taken: list[tuple[int, Any]]) -> Micro:
        """A micro-batch without its step, which only the rank's own process knows."""
        slot = Slot(0, epoch, lane, False, tuple(place for place, _ in taken))
        if not taken:
            return Micro(slot, batches.empty(self._collate([self._some_sample(epoch)])))
        rng.key_generators(
            self._seed, rng.SAMPLE, epoch, lane, slot.indices[0], _COLLATE, devices=False
        )
        with named(f"collating samples {list(slot.indices)} of lane {lane} of epoch {epoch}"):
            return Micro(slot, self._own_memory(self._collate([sample for _, sample in taken])))

    def _some_sample(self, epoch: int) -> Any:
        """A sample, for the form of an empty micro-batch: from another lane if need be."""
        cut = dataclasses.replace(self._cut, micro_size=1)
        for number in range(cut.feeds):
            if self._form is not None:
                break
            feed = Feed(self._dataset, cut, number=number, seed=self._seed, epoch=epoch)
            feed.take()
            self._form = feed.first
        if self._form is None:
            raise ConfigError(f'--task: dataset("train") gives no sample in epoch {epoch}.')
        return self._form


class StreamBatches(IterableDataset[Micro]):
    """The batches of a stream that are a rank's share: number n is for rank n mod W.

    Each rank reads the whole stream, so that all know how many batches there are. One that is empty
    comes last and bears that number.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, seed: int, collate: Collate, rank: int,
        num_ranks: int,
    ) -> None:  # fmt: skip
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._cut = Cut(lanes=1, micro_size=batch_size, own=False)
        self._rank, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[Micro]:
        return handing_over(self._share(), rank=self._rank, worker=this_worker())

    def _share(self) -> Iterator[Micro]:
        torch.utils.data._utils.worker._worker_info = None  # as in LaneReader
        begin_epoch(self._dataset, 0, seed=self._seed)
        feed = Feed(self._dataset, self._cut, number=0, seed=self._seed, epoch=0)
        number = 0
        while taken := feed.take():
            if number % self._num_ranks == self._rank:
                slot = Slot(0, 0, number, True, tuple(place for place, _ in taken))
                with named(f"collating batch {number} of the stream"):
                    batch = self._collate([sample for _, sample in taken])
                yield Micro(slot, batch)
            number += 1
        if number:
            slot = Slot(0, 0, number, True, ())
            yield Micro(slot, batches.empty(self._collate([feed.first])))
