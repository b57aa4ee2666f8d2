"""A rank's part of a stream, window by window and epoch after epoch, and the place to go on from.

The place belongs to the lanes and not to ranks or workers, so a run goes on with any number of
both. What a lane's iterator tells of itself comes along with each window that was read from it,
and the place is that of the window that was trained on, however far the reading is ahead.

The processes are those of torch's own DataLoader. torchdata's StatefulDataLoader, whose protocol
the iterators may have, would keep the same states by worker, of one rank alone, and a state of two
workers can't be loaded into none.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer.data.bad import received
from trainer.data.feed import Cut, Mark
from trainer.data.lanes import Collate, LaneReader, Part
from trainer.data.loader import reading, shut_down
from trainer.data.reading import Micro
from trainer.data.sampler import block, slots
from trainer.errors import ConfigError


class Stream:
    """This rank's micro-batches of a stream; a resumable part of the run.

    Whether a window counts is known when its samples have been added over the ranks; the steps that
    are made follow from that, and with them the place. Where one doesn't count, `next_epoch`.

    Args:
        workers: loader processes; at most one a lane, and one where the stream is read whole.
        prefetch: micro-batches ahead, for each worker.
        step: tells the steps made so far.
        gather: the JSON values of all ranks (collective).
    """

    def __init__(
        self, dataset: Any, cut: Cut, *, seed: int, collate: Collate, rank: int, num_ranks: int,
        workers: int, prefetch: int, device: torch.device, step: Callable[[], int],
        gather: Callable[[Any], list[Any]],
    ) -> None:  # fmt: skip
        self._dataset, self._cut, self._seed, self._collate = dataset, cut, seed, collate
        self._rank, self._lanes = rank, block(cut.lanes, rank, num_ranks)
        self._slots = slots(cut.lanes, num_ranks)
        self._step, self._gather = step, gather
        self._workers = min(workers, len(self._lanes) if cut.own else 1)
        lanes_each = -(-len(self._lanes) // max(1, self._workers))
        self._reading = {**reading(self._workers, -(-prefetch // lanes_each), device),
                         "persistent_workers": self._workers > 0}  # fmt: skip
        self._epoch = 0
        self._start = 0
        """The step before the epoch's first."""
        self._marks: dict[int, Mark] = {}
        """Of each feed, the last one known; the epoch's beginning where there is none."""
        self._taken: dict[int, dict[int, Mark]] = {}
        """Step → where the feeds of this rank stand after it: of the steps since the last."""
        self._loader: DataLoader[Part] | None = None
        self._iterator: Iterator[Part] | None = None
        self._begun: dict[str, Any] = {}
        self._first = 0
        """The step that the iterator's first window is for."""
        self._count = 0
        """Micro-batches that the iterator has given."""
        self._ready: deque[Micro] = deque()

    def __iter__(self) -> Iterator[Micro]:
        return self

    def __next__(self) -> Micro:
        if self._iterator is None:
            self._begin()
        while not self._ready:
            self._fill()
        return self._ready.popleft()

    def next_epoch(self) -> None:
        """The window that was read last didn't count, on no rank: go on with the next epoch.

        Raises:
            ConfigError: it was the epoch's first, so none ever would count.
        """
        if self._step() == self._start:
            raise ConfigError(
                f"--batch.global-size {self._cut.lanes * self._cut.micro_size}: epoch "
                f"{self._epoch} of the training stream ends before its first global batch is "
                f"whole ({self._cut.lanes} lanes of {self._cut.micro_size} samples); use a "
                "smaller one, or --data.drop-last off if there are samples at all.")
        assert self._loader is not None, "an epoch ends by being read"
        self._epoch, self._start = self._epoch + 1, self._step()
        self._marks, self._taken = {}, {}
        self._iterate()

    def share(self) -> None:
        """Collective. Tell each other where the feeds stand, for a save.

        Without, `state_dict` knows those of the other ranks as of the last time or the epoch's
        beginning: exact too, but a resumed run has to read through what lies between.
        """
        own = self._marks | self._taken.get(self._step(), {})
        mine = {number: dataclasses.asdict(own.get(number, Mark()))
                for number in self._cut.feeds_of(self._lanes)}
        for theirs in self._gather(mine):
            self._marks |= {int(number): Mark(**mark) for number, mark in theirs.items()}

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step made, of all lanes."""
        marks = self._marks | self._taken.get(self._step(), {})
        return {
            "epoch": self._epoch, "start": self._start, "lanes": self._cut.lanes,
            "micro_size": self._cut.micro_size,
            "feeds": [dataclasses.asdict(marks.get(n, Mark())) for n in range(self._cut.feeds)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place; before the first micro-batch is read.

        Raises:
            ConfigError: the stream was cut into other lanes.
        """
        if self._iterator is not None:
            # It was loaded when reading began, and comes again with the rest of the state.
            assert state == self._begun, "the stream is already being read from another place"
            return
        was = (state["lanes"], state["micro_size"], len(state["feeds"]))
        now = (self._cut.lanes, self._cut.micro_size, self._cut.feeds)
        if was != now:
            raise ConfigError(
                f"--batch.micro-size {now[1]}: the place in the training stream is one of {was[0]} "
                f"lanes of {was[1]} samples read by {was[2]} iterators, and here are {now[0]} of "
                f"{now[1]} read by {now[2]}: keep --batch.global-size and --batch.micro-size (and "
                "the data set's lane()), or start anew in another --run.")
        self._epoch, self._start = state["epoch"], state["start"]
        self._marks = {number: Mark(**mark) for number, mark in enumerate(state["feeds"])}

    def close(self) -> None:
        """End the loader's processes."""
        shut_down(self._iterator)

    def _begin(self) -> None:
        self._begun = self.state_dict()
        reader = LaneReader(
            self._dataset, self._cut, lanes=self._lanes,
            empty_slots=self._slots - len(self._lanes), seed=self._seed, collate=self._collate,
            epoch=self._epoch, windows=self._step() - self._start, marks=self._marks,
            rank=self._rank,
        )  # fmt: skip
        self._loader = DataLoader(reader, **self._reading)
        self._iterate()

    def _iterate(self) -> None:
        """Begin with the windows after the last step made; what was read ahead is dropped."""
        assert self._loader is not None
        self._iterator = iter(self._loader)
        self._ready.clear()
        self._first, self._count = self._step() + 1, 0

    def _fill(self) -> None:
        """Take what the next worker has read, which is a window or a part of one."""
        assert self._iterator is not None
        part = received(next(self._iterator))
        window = self._count // self._slots
        for micro in part.micros:
            self._count += 1
            slot = dataclasses.replace(micro.slot, step=self._first + window,
                                       last=self._count % self._slots == 0)
            self._ready.append(dataclasses.replace(micro, slot=slot))
        for past in [step for step in self._taken if step < self._step()]:
            del self._taken[past]
        self._taken.setdefault(self._first + window, {}).update(part.marks)
