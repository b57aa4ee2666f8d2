"""Sampler of numbered micro-batches for map-style data sets.

An optimizer step always consumes one global batch, split into M numbered micro-batches. Rank r of W
takes the contiguous block [r·M/W, (r+1)·M/W), so a change of W changes no micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from trainer.data.order import Order
from trainer.distributed.partition import block, micro_batches_per_rank

BLOCK = 4096
"""Least number of samples of a rank whose order is computed at once."""


@dataclass(frozen=True)
class DataPosition:
    """A position of the run: after `step` steps, `sample` samples of an epoch are consumed."""

    step: int = 0
    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How an epoch of `samples` samples is split into windows (global batches) and micro-batches;
    steps count from 1, epochs from 0. It begins at `origin`; what came before had other windows."""

    samples: int
    global_size: int
    micro_size: int
    drop_last: bool
    in_lanes: bool = False
    """Whether the data are a stream: a micro-batch per lane in each window, also short or empty."""

    origin: DataPosition = DataPosition()

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return self._windows(self.samples)

    def _windows(self, samples: int) -> int:
        whole, rest = divmod(max(0, samples), self.global_size)
        return whole + (1 if rest and not self.drop_last else 0)

    @functools.cached_property
    def _first_windows(self) -> int:
        """Windows in the epoch of the origin."""
        return self._windows(self.samples - self.origin.sample)

    def place_after(self, step: int) -> DataPosition:
        """The position after a step: epoch and first sample of the next one."""
        number = step - self.origin.step
        if number < self._first_windows:
            first = self.origin.sample + number * self.global_size
            return DataPosition(step, self.origin.epoch, first)
        epochs, window = divmod(number - self._first_windows, self.steps_per_epoch)
        return DataPosition(step, self.origin.epoch + 1 + epochs, window * self.global_size)

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) of a step."""
        return self.place_after(step - 1).epoch

    def steps_of(self, epochs: int) -> int:
        """Steps of a run of this number of epochs."""
        left = self._first_windows + (epochs - self.origin.epoch - 1) * self.steps_per_epoch
        return self.origin.step + max(0, left)

    def window(self, step: int) -> tuple[int, int]:
        """The range (first, end) of a step's samples in the order of its epoch."""
        first = self.place_after(step - 1).sample
        return first, min(first + self.global_size, self.samples)

    def micro_batches(self, step: int) -> int:
        """M, the number of micro-batches in a step; global_size / micro_size for a full window."""
        if self.in_lanes:
            return self.global_size // self.micro_size
        first, end = self.window(step)
        return -(-(end - first) // self.micro_size)


class Draw(int):
    """The index of a sample that may occur several times in an epoch: its random draws are keyed by
    its place in the epoch, so that two copies of it are augmented differently."""

    def __new__(cls, index: int, place: int) -> Draw:
        return super().__new__(cls, index)

    def __init__(self, index: int, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[type[Draw], tuple[int, int]]:
        return Draw, (int(self), self.place)


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """The sample indices of a micro-batch, and its position in the run."""

    step: int
    epoch: int
    number: int
    """Number of the micro-batch in its global batch; -1 for a stand-in."""
    last: bool
    """Whether it is the rank's last one of the step, whose backward synchronises gradients."""
    indices: tuple[int, ...]
    stand_in: tuple[int, ...] = ()
    """Samples to compute without any effect where there are no `indices`, since other ranks may
    wait for this one in a collective of the forward or backward."""


@dataclass(frozen=True)
class MicroBatchSampler:
    """Iterates over the micro-batches of one rank, from `position` to the end of the run: all
    remaining epochs at once, so loader workers are started only once."""

    plan: BatchPlan
    _: KW_ONLY
    rank: int
    num_ranks: int
    order: Order
    position: int
    """Global batches already consumed: the first micro-batch belongs to step `position` + 1."""
    total_steps: int

    def __iter__(self) -> Iterator[MicroBatchSpec]:
        waiting, samples, epoch = list[_Places](), 0, -1
        for step in range(self.position + 1, self.total_steps + 1):
            if samples >= BLOCK or self.plan.epoch_of(step) != epoch:
                yield from self._ordered(waiting, epoch)
                waiting, samples, epoch = [], 0, self.plan.epoch_of(step)
            for own in self._places_of(step):
                waiting.append(own)
                samples += len(own.places)
        yield from self._ordered(waiting, epoch)

    def _places_of(self, step: int) -> Iterator[_Places]:
        """This rank's micro-batches of a step."""
        first, end = self.plan.window(step)
        micro_batches, size = self.plan.micro_batches(step), self.plan.micro_size
        numbers = list(block(micro_batches, self.rank, self.num_ranks))
        numbers += [-1] * (micro_batches_per_rank(micro_batches, self.num_ranks) - len(numbers))
        for count, number in enumerate(numbers, start=1):
            start = first + max(number, 0) * size
            yield _Places(step, number, count == len(numbers), range(start, min(start + size, end)))

    def _ordered(self, waiting: list[_Places], epoch: int) -> Iterator[MicroBatchSpec]:
        """Micro-batches of one epoch with their samples."""
        if not waiting:
            return
        places = np.concatenate([np.arange(p.start, p.stop, dtype=np.int64)
                                 for *_, p in waiting])
        found, at = self.order(epoch, places).tolist(), 0
        for step, number, last, own in waiting:
            indices, at = tuple(found[at : at + len(own)]), at + len(own)
            if self.order.repeats:
                indices = tuple(map(Draw, indices, own))
            used, stand_in = (indices, ()) if number >= 0 else ((), indices)
            yield MicroBatchSpec(step, epoch, number, last, used, stand_in)


class _Places(NamedTuple):
    """A micro-batch of a rank, and its places in the order of the epoch."""

    step: int
    number: int
    last: bool
    places: range
