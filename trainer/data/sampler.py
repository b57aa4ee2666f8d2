"""Sampler of numbered micro-batches for map-style data sets.

An optimizer step always consumes one global batch, split into M numbered micro-batches. Rank r of W
takes the contiguous block [r·M/W, (r+1)·M/W), so a change of W changes no micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from trainer import rng
from trainer.distributed.partition import block, micro_batches_per_rank


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How an epoch of `samples` samples is split into windows (global batches) and micro-batches.

    Steps count from 1, epochs from 0.
    """

    samples: int
    global_size: int
    micro_size: int
    drop_last: bool
    in_lanes: bool = False
    """Whether the data are a stream: then each window has one micro-batch per lane, possibly short
    or empty."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
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
    """Specification of one micro-batch: its sample indices and its position in the run."""

    step: int
    epoch: int
    number: int
    """Number of the micro-batch in its global batch; -1 for an empty one."""
    last: bool
    """Whether it is the rank's last micro-batch of the step, whose backward pass synchronises
    gradients."""
    indices: tuple[int, ...]


class MicroBatchSampler(DistributedSampler[MicroBatchSpec]):
    """Yields the micro-batches of one rank, from `position` to the end of the run.

    One iteration covers all remaining epochs, so loader workers are started only once.

    Args:
        position: global batches already consumed; the first micro-batch belongs to step
            `position` + 1.
        total_steps: the last step of the run.
    """

    def __init__(
        self, plan: BatchPlan, *, rank: int, num_ranks: int, seed: int, shuffle: bool,
        position: int, total_steps: int,
    ) -> None:
        super().__init__(
            range(plan.samples),  # type: ignore[arg-type]
            num_replicas=num_ranks, rank=rank, shuffle=shuffle,
            seed=seed, drop_last=plan.drop_last,
        )  # fmt: skip
        self.plan = plan
        self.position = position
        self.total_steps = total_steps

    def order(self, epoch: int) -> torch.Tensor:
        """Sample indices of an epoch in training order: int64 tensor of shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self.plan.samples)
        generator = torch.Generator()
        generator.manual_seed(rng.mix(self.seed, rng.ORDER, epoch))
        return torch.randperm(self.plan.samples, generator=generator)

    def __len__(self) -> int:
        return sum(
            micro_batches_per_rank(self.plan.micro_batches(step), self.num_replicas)
            for step in range(self.position + 1, self.total_steps + 1)
        )

    def __iter__(self) -> Iterator[MicroBatchSpec]:
        order = np.empty(0, dtype=np.int64)
        for step in range(self.position + 1, self.total_steps + 1):
            epoch = self.plan.epoch_of(step)
            if step == self.position + 1 or epoch != self.epoch:
                self.set_epoch(epoch)
                order = self.order(epoch).numpy()
            yield from self._slots_of(step, epoch, order)

    def _slots_of(self, step: int, epoch: int, order: np.ndarray) -> Iterator[MicroBatchSpec]:
        first, end = self.plan.window(step)
        micro_batches = self.plan.micro_batches(step)
        mine = block(micro_batches, self.rank, self.num_replicas)
        count = micro_batches_per_rank(micro_batches, self.num_replicas)
        for place in range(count):
            last = place == count - 1
            if place < len(mine):
                start = first + mine[place] * self.plan.micro_size
                stop = min(start + self.plan.micro_size, end)
                yield MicroBatchSpec(step, epoch, mine[place], last,
                                     tuple(order[start:stop].tolist()))
            else:
                yield MicroBatchSpec(step, epoch, -1, last, ())
