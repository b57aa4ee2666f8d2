"""Collate the lanes of a stream into micro-batches, in a loader worker or the rank's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer import rng
from trainer.data import batch as batches
from trainer.data.feed import Cut, Feed, Mark
from trainer.data.map_dataset import Micro, begin_epoch
from trainer.data.sample_errors import handing_over, named, this_worker
from trainer.data.sampler import Slot
from trainer.distributed.partition import block
from trainer.errors import ConfigError

Collate = Callable[[list[Any]], Any]
_COLLATE = 1


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """A stream data set and how it is read."""

    dataset: Any
    layout: Cut
    seed: int
    collate: Collate


@dataclass(frozen=True)
class Part:
    """What one process has read for a window: its micro-batches, and its iterators' positions
    after the window."""

    micros: list[Micro]
    marks: dict[int, Mark]

    def pin_memory(self) -> Part:
        """Called by the DataLoader."""
        return Part([micro.pin_memory() for micro in self.micros], self.marks)


class LaneReader(IterableDataset[Part]):
    """Yields the micro-batches of some lanes, one `Part` per window.

    In a loader worker it yields only the worker's share of the lanes. Each iteration is the next
    epoch and never ends: only the ranks together know whether an epoch is over, so a lane that has
    ended yields empty micro-batches.

    Args:
        lanes: the lanes of this rank.
        empty_slots: empty micro-batches to append to each window.
        epoch, windows, marks: the position where the first iteration begins.
        rank: used in error messages.
    """

    def __init__(
        self, spec: StreamSpec, *, lanes: Sequence[int], empty_slots: int, epoch: int,
        windows: int, marks: Mapping[int, Mark], rank: int = 0,
    ) -> None:  # fmt: skip
        self._dataset, self._layout = spec.dataset, spec.layout
        self._seed, self._collate = spec.seed, spec.collate
        self._lanes, self._empty_slots = lanes, empty_slots
        self._first = (epoch, windows, dict(marks))
        self._iterations = 0
        self._rank = rank
        self._worker: int | None = None
        self._example: Any = None
        self._own_memory = batches.OwnMemory()

    def __iter__(self) -> Iterator[Part]:
        info = get_worker_info()
        if info is not None:
            count, self._worker = len(self._lanes), info.id
            self._lanes = [self._lanes[i] for i in block(count, info.id, info.num_workers)]
            self._empty_slots *= info.id == info.num_workers - 1
            # The lanes are already divided among the workers: a data set that divides itself again
            # by get_worker_info() would drop samples. In a worker's later epochs `info` is None, so
            # the division above is done once.
            torch.utils.data._utils.worker._worker_info = None
        epoch, windows, marks = self._first
        if self._iterations:
            epoch, windows, marks = epoch + self._iterations, 0, {}
        self._iterations += 1
        parts = self._parts(epoch, windows, marks)
        return handing_over(parts, rank=self._rank, worker=self._worker)

    def _parts(self, epoch: int, windows: int, marks: dict[int, Mark]) -> Iterator[Part]:
        begin_epoch(self._dataset, epoch, seed=self._seed)
        iterators = [
            Feed(self._dataset, self._layout, number=number, seed=self._seed, epoch=epoch,
                 mark=marks.get(number, Mark()), windows=windows)
            for number in self._layout.iterators_of(self._lanes)
        ]  # fmt: skip
        while True:
            windows += 1
            taken: dict[int, list[tuple[int, Any]]] = {lane: [] for lane in self._lanes}
            for iterator in iterators:
                for place, sample in iterator.take():
                    lane = self._layout.lane_of(iterator.number, place)
                    if lane in taken:
                        taken[lane].append((place, sample))
                if self._example is None:
                    self._example = iterator.first
            micros = [self._micro(epoch, lane, samples) for lane, samples in taken.items()]
            micros += [self._micro(epoch, -1, []) for _ in range(self._empty_slots)]
            yield Part(micros, {iterator.number: iterator.mark(windows) for iterator in iterators})

    def _micro(self, epoch: int, lane: int, taken: list[tuple[int, Any]]) -> Micro:
        """A micro-batch with step 0; the rank's own process sets the real step."""
        slot = Slot(0, epoch, lane, False, tuple(place for place, _ in taken))
        if not taken:
            return Micro(slot, batches.empty(self._collate([self._some_sample(epoch)])))
        rng.key_generators(
            self._seed, rng.SAMPLE, epoch, lane, slot.indices[0], _COLLATE, devices=False
        )
        with named(f"collating samples {list(slot.indices)} of lane {lane} of epoch {epoch}"):
            return Micro(slot, self._own_memory(self._collate([sample for _, sample in taken])))

    def _some_sample(self, epoch: int) -> Any:
        """Any sample, as the template of an empty micro-batch; read from another lane if needed."""
        layout = dataclasses.replace(self._layout, micro_size=1)
        for number in range(layout.iterators):
            if self._example is not None:
                break
            iterator = Feed(self._dataset, layout, number=number, seed=self._seed, epoch=epoch)
            iterator.take()
            self._example = iterator.first
        if self._example is None:
            raise ConfigError(f'--task: dataset("train") has no sample in epoch {epoch}.')
        return self._example


class StreamBatches(IterableDataset[Micro]):
    """Yields one rank's share of a stream's batches: batch n belongs to rank n mod W.

    Each rank reads the whole stream, so every rank knows the number of batches. It is the number of
    the last batch that is yielded, which is empty.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, seed: int, collate: Collate, rank: int,
        num_ranks: int,
    ) -> None:  # fmt: skip
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._layout = Cut(lanes=1, micro_size=batch_size, per_lane=False)
        self._rank, self._num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[Micro]:
        return handing_over(self._share(), rank=self._rank, worker=this_worker())

    def _share(self) -> Iterator[Micro]:
        torch.utils.data._utils.worker._worker_info = None  # as in LaneReader
        begin_epoch(self._dataset, 0, seed=self._seed)
        iterator = Feed(self._dataset, self._layout, number=0, seed=self._seed, epoch=0)
        number = 0
        while taken := iterator.take():
            if number % self._num_ranks == self._rank:
                slot = Slot(0, 0, number, True, tuple(place for place, _ in taken))
                with named(f"collating batch {number} of the stream"):
                    batch = self._collate([sample for _, sample in taken])
                yield Micro(slot, batch)
            number += 1
        if number:
            slot = Slot(0, 0, number, True, ())
            yield Micro(slot, batches.empty(self._collate([iterator.first])))
