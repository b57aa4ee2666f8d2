"""Sampler of numbered micro-batches for map-style data sets.

An optimizer step always consumes one global batch, split into M numbered micro-batches. Rank r of W
takes the contiguous block [r·M/W, (r+1)·M/W), so a change of W changes no micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from trainer import rng
from trainer.distributed.partition import block, micro_batches_per_rank


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How an epoch of `samples` samples is split into windows (global batches) and micro-batches;
    steps count from 1, epochs from 0."""

    samples: int
    global_size: int
    micro_size: int
    drop_last: bool
    in_lanes: bool = False
    """Whether the data are a stream: a micro-batch per lane in each window, also short or empty."""

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.global_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def epoch_of(self, step: int) -> int:
        """The epoch (from 0) of a step."""
        return (step - 1) // self.steps_per_epoch

    def window(self, step: int) -> tuple[int, int]:
        """The range (first, end) of a step's samples in the order of its epoch."""
        first = (step - 1) % self.steps_per_epoch * self.global_size
        return first, min(first + self.global_size, self.samples)

    def micro_batches(self, step: int) -> int:
        """M, the number of micro-batches in a step; global_size / micro_size for a full window."""
        if self.in_lanes:
            return self.global_size // self.micro_size
        first, end = self.window(step)
        return -(-(end - first) // self.micro_size)


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
    seed: int
    shuffle: bool
    position: int
    """Global batches already consumed: the first micro-batch belongs to step `position` + 1."""
    total_steps: int

    def order(self, epoch: int) -> torch.Tensor:
        """Sample indices of an epoch in training order."""
        if not self.shuffle:
            return torch.arange(self.plan.samples)
        generator = torch.Generator()
        generator.manual_seed(rng.mix(self.seed, rng.ORDER, epoch))
        return torch.randperm(self.plan.samples, generator=generator)

    def __iter__(self) -> Iterator[MicroBatchSpec]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for step in range(self.position + 1, self.total_steps + 1):
            if epoch != self.plan.epoch_of(step):
                epoch = self.plan.epoch_of(step)
                order = self.order(epoch).numpy()
            yield from self._specs_of(step, epoch, order)

    def _specs_of(self, step: int, epoch: int, order: np.ndarray) -> Iterator[MicroBatchSpec]:
        first, end = self.plan.window(step)
        micro_batches = self.plan.micro_batches(step)
        numbers = list(block(micro_batches, self.rank, self.num_ranks))
        numbers += [-1] * (micro_batches_per_rank(micro_batches, self.num_ranks) - len(numbers))
        for place, number in enumerate(numbers, start=1):
            start = first + max(number, 0) * self.plan.micro_size
            indices = tuple(order[start : min(start + self.plan.micro_size, end)].tolist())
            used, stand_in = (indices, ()) if number >= 0 else ((), indices)
            yield MicroBatchSpec(step, epoch, number, place == len(numbers), used, stand_in)
