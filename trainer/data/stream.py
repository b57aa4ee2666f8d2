"""The micro-batches of one rank of a stream, with a position that can be saved and resumed.

The position is stored per lane, not per rank or worker (as in torchdata's StatefulDataLoader), so a
run can resume with other numbers of both. Each window brings the states of its lanes' iterators,
and the saved position is that after the last trained window, regardless of prefetching.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer.data.map_dataset import MicroBatch
from trainer.data.stream_reader import LanePosition, LaneReader, StreamSpec
from trainer.data.workers import DataReader
from trainer.distributed.partition import block, micro_batches_per_rank
from trainer.errors import ConfigError


class StreamReader:
    """The micro-batches of one rank of a stream; a resumable part of the run's state.

    Whether a window is used for a step is known only after its sample count has been summed over
    the ranks: the position follows from the number of completed steps.

    Args:
        workers: loader processes; at most one per lane, or one if the data set has no `lane()`.
        prefetch: micro-batches to read ahead, per worker.
        step: returns the number of completed steps.
        gather: collects a JSON value from each rank (collective).
    """

    def __init__(
        self, spec: StreamSpec, *, rank: int, num_ranks: int, workers: int, prefetch: int,
        device: torch.device, step: Callable[[], int], gather: Callable[[Any], list[Any]],
    ) -> None:  # fmt: skip
        self._spec = spec
        self._rank, self._lanes = rank, block(spec.lanes, rank, num_ranks)
        self._slots = micro_batches_per_rank(spec.lanes, num_ranks)
        self._step, self._gather = step, gather
        self._workers = min(workers, len(self._lanes) if spec.per_lane else 1)
        self._prefetch, self._device = prefetch, device
        self._epoch = 0
        self._start = 0  # the step before the first one of the epoch
        self._marks: dict[int, LanePosition] = {}
        """Iterator → its last known position; missing: the start of the epoch."""
        self._taken: dict[int, dict[int, LanePosition]] = {}
        """Step → new positions of this rank's iterators after it; from the last completed step on.
        """
        self._readers: list[DataReader] = []
        """One per loader process; empty before the first micro-batch."""
        self._turns: Iterator[DataReader] = iter(())
        self._begun: dict[str, Any] = {}
        self._first = 0  # the step of the first window since the last (re)start of reading
        self._count = 0  # number of micro-batches read since then
        self._ready: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if not self._readers:
            self._begin()
        while not self._ready:
            self._fill()
        return self._ready.popleft()

    def next_epoch(self) -> None:
        """Drop the last window, which no rank uses, and begin the next epoch."""
        if self._step() == self._start:
            raise ConfigError(
                f"--batch.global-size {self._spec.lanes * self._spec.micro_size}: epoch "
                f"{self._epoch} of the training stream ends before its first global batch is "
                f"complete ({self._spec.lanes} lanes of {self._spec.micro_size} samples); use "
                "a smaller --batch.global-size, or --data.drop-last off if the stream has samples.")
        self._epoch, self._start = self._epoch + 1, self._step()
        self._marks, self._taken = {}, {}
        for reader in self._readers:
            reader.restart()
        self._start_window()

    def share(self) -> None:
        """Exchange the iterators' positions between all ranks before a save (collective). Without
        it a resumed run reads and drops the samples since the last exchange: slower, but exact."""
        own = self._positions()
        mine = {number: vars(own.get(number, LanePosition()))
                for number in self._spec.iterators_of(self._lanes)}
        for theirs in self._gather(mine):
            self._marks |= {int(number): LanePosition(**mark) for number, mark in theirs.items()}

    def state_dict(self) -> dict[str, Any]:
        """The position of all lanes after the last completed step."""
        marks = self._positions()
        return {
            "epoch": self._epoch, "start": self._start, "lanes": self._spec.lanes,
            "micro_size": self._spec.micro_size,
            "feeds": [dict(vars(marks.get(n, LanePosition())))
                      for n in range(self._spec.iterators)],
        }

    def _positions(self) -> dict[int, LanePosition]:
        """The last known positions up to the last completed step."""
        step, marks = self._step(), self._marks
        for taken, found in list(self._taken.items()):
            if taken <= step:
                marks = marks | found
        return marks

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position; must be called before the first micro-batch is read."""
        if self._readers:
            # Already loaded before reading began; this is the call with the rest of the state.
            assert state == self._begun, "the stream is already being read from another position"
            return
        was = (state["lanes"], state["micro_size"], len(state["feeds"]))
        now = (self._spec.lanes, self._spec.micro_size, self._spec.iterators)
        if was != now:
            raise ConfigError(
                f"--batch.micro-size {now[1]}: the saved position in the training stream is for "
                f"{was[0]} lanes of {was[1]} samples read by {was[2]} iterators, but this run has "
                f"{now[0]} lanes of {now[1]} samples read by {now[2]}; keep --batch.global-size "
                "and --batch.micro-size (and the data set's lane()), or start a new --run-dir.")
        self._epoch, self._start = state["epoch"], state["start"]
        self._marks = {number: LanePosition(**mark) for number, mark in enumerate(state["feeds"])}

    def close(self) -> None:
        """End the loader's processes."""
        for reader in self._readers:
            reader.close()

    def _begin(self) -> None:
        self._begun = self.state_dict()
        number = max(1, self._workers)
        ahead = -(-self._prefetch // -(-len(self._lanes) // number))
        for worker in range(number):
            # A loader of its own for each process: a data set that divides itself by
            # `get_worker_info()` would drop samples, since the lanes are divided already.
            lanes = [self._lanes[i] for i in block(len(self._lanes), worker, number)]
            last = worker == number - 1
            reader = LaneReader(
                self._spec, lanes=lanes, epoch=self._epoch, marks=self._marks,
                empty_slots=self._slots - len(self._lanes) if last else 0,
                windows=self._step() - self._start, rank=self._rank,
                worker=worker if self._workers else None)
            self._readers.append(DataReader(
                reader, workers=min(1, self._workers), prefetch=ahead, device=self._device,
                first_worker=worker))
        self._start_window()

    def _start_window(self) -> None:
        """Go on after the last completed step; prefetched micro-batches are dropped."""
        self._turns = itertools.cycle(self._readers)
        self._ready.clear()
        self._first, self._count = self._step() + 1, 0

    def _fill(self) -> None:
        """Receive the next worker's part of a window."""
        part = next(next(self._turns))
        window = self._count // self._slots
        for micro in part.micro_batches:
            self._count += 1
            spec = dataclasses.replace(micro.spec, step=self._first + window,
                                       last=self._count % self._slots == 0)
            self._ready.append(dataclasses.replace(micro, spec=spec))
        for past in [step for step in self._taken if step < self._step()]:
            self._marks = self._marks | self._taken[past]
            del self._taken[past]
        self._taken.setdefault(self._first + window, {}).update(part.marks)
