"""Streams read in this process and in workers: positions, orders, states, errors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info
from torchdata.nodes import (
    IterableWrapper,
    Loader,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.data import stream_reader
from trainer.data.sample_errors import SampleError
from trainer.data.stream import StreamReader
from trainer.data.stream_reader import StreamSpec, first_samples
from trainer.errors import ConfigError


class Counted(IterableDataset):
    """Lane k has `size` samples 100 k, 100 k + 1, …"""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("its lanes are read")

    def lane(self, number: int, lanes: int) -> Iterator[int]:
        return iter(range(100 * number, 100 * number + self.size))


class Ordered(IterableDataset):
    """Draws its order in `set_epoch`, and has no order before."""

    def set_epoch(self, epoch: int) -> None:
        self.order = random.sample(range(8), 8)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def test_first_samples_of_a_stream_come_from_a_keyed_order():
    read = [first_samples(Ordered(), lanes=2, count=8, seed=1) for _ in "12"]

    assert read[0] == read[1]


class DividedByWorker(Counted):
    """A stream that splits itself by worker, as many do."""

    def lane(self, number: int, lanes: int) -> Iterator[int]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(100 * number + first, 100 * number + self.size, every))


class Resumable(IterableDataset):
    """A stream that holds its own position, in an object that it returns and keeps changing."""

    def __init__(self) -> None:
        self.place = {"next": 0}
        self.read: list[int] = []
        self.loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.place["next"] = 0
        self.loaded = False
        while self.place["next"] < 24:
            self.place["next"] += 1
            self.read.append(self.place["next"] - 1)
            yield self.place["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.loaded = dict(state), True


class Broken(Counted):
    """Lanes whose sample 5 can't be read, or whose state isn't JSON."""

    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state

    def lane(self, number: int, lanes: int) -> Iterator[int]:
        return self if self.state is not None else self._failing()

    def _failing(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("no such shard")

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


class Rank:
    """A rank's stream, and its number of completed steps."""

    def __init__(
        self, dataset: IterableDataset, rank: int = 0, size: int = 1, *, workers: int = 0,
        step: int = 0, gather=None) -> None:
        self.step = step
        self.stream = StreamReader(
            StreamSpec(dataset=dataset, lanes=4, micro_size=2, seed=3),
            rank=rank, num_ranks=size, workers=workers, prefetch=2, device=torch.device("cpu"),
            step=lambda: self.step, gather=gather or (lambda mine: [mine]))

    def window(self) -> dict[int, list[int]]:
        """Make a step; returns lane → samples."""
        lanes = {}
        while True:
            micro = next(self.stream)
            assert micro.spec.step == self.step + 1
            lanes[micro.spec.number] = micro.batch.tolist()[: micro.samples]
            if micro.spec.last:
                self.step += 1
                return lanes

    def resumed(self, state: dict[str, Any]) -> Rank:
        self.stream.load_state_dict(json.loads(json.dumps(state)))
        return self


def test_the_state_of_a_single_rank_continues_the_lanes_of_the_others():
    positions: list[Any] = []

    def gather(mine: Any) -> list[Any]:
        positions.append(json.loads(json.dumps(mine)))
        return positions

    first, second = (Rank(Counted(), rank, 2, gather=gather) for rank in range(2))
    for rank in (second, first, second, first):
        rank.window()
    second.stream.share()
    first.stream.share()  # the one that receives both positions, as in a save
    for rank in (second, first, second, first):
        rank.window()
    lone = first.stream.state_dict()

    resumed = Rank(Counted(), 0, 1, step=4).resumed(lone)

    assert [feed["windows"] for feed in lone["feeds"]] == [4, 4, 2, 2]
    assert resumed.window() == {**first.window(), **second.window()}


def test_the_state_is_that_of_the_last_step_and_not_of_prefetched_windows():
    dataset = Resumable()
    run = Rank(dataset)
    run.window()
    next(run.stream)  # of the second window: 16 samples are read now
    assert dataset.read == list(range(16))
    state = run.stream.state_dict()

    again = Resumable()
    resumed = Rank(again, step=1).resumed(state)

    assert state["feeds"] == [{"windows": 1, "state": {"next": 8}, "ended": False}]
    assert resumed.window() == {0: [8, 12], 1: [9, 13], 2: [10, 14], 3: [11, 15]}
    assert again.read == list(range(8, 16)), "it reads through nothing"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_large_state_is_taken_rarely_and_the_samples_since_then_are_read_again(
    monkeypatch, workers
):
    monkeypatch.setattr(stream_reader, "CHEAP_S", -1.0)
    monkeypatch.setattr(stream_reader, "STATE_SHARE", 1e-12)
    run = Rank(Resumable(), workers=workers)
    for _ in range(2):
        run.window()
    state = run.stream.state_dict()

    again = Resumable()
    resumed = Rank(again, step=2).resumed(state)

    assert state["feeds"] == [{"windows": 1, "state": {"next": 8}, "ended": False}]
    assert resumed.window() == run.window()
    assert again.read == list(range(8, 24))
    run.stream.close()


def test_a_state_of_the_last_window_of_an_epoch_leads_to_the_next_epoch():
    run = Rank(Resumable())
    for _ in range(3):
        run.window()

    resumed = Rank(Resumable(), step=3).resumed(run.stream.state_dict())

    assert next(resumed.stream).samples == 0
    resumed.stream.next_epoch()
    assert next(resumed.stream).batch.tolist() == [0, 4]


def test_a_stream_that_splits_itself_by_worker_loses_no_samples():
    run = Rank(DividedByWorker(size=4), workers=2)

    windows = [run.window() for _ in range(2)]
    run.window()  # has nothing left
    run.stream.next_epoch()
    windows += [run.window() for _ in range(2)]

    run.stream.close()
    assert windows[0] == windows[2] == {k: [100 * k, 100 * k + 1] for k in range(4)}
    assert windows[1] == windows[3] == {k: [100 * k + 2, 100 * k + 3] for k in range(4)}


def test_a_position_with_another_lane_layout_is_refused():
    state = {"epoch": 0, "start": 0, "lanes": 2, "micro_size": 4, "feeds": [{}, {}]}

    with pytest.raises(ConfigError, match=r"2 lanes of 4 samples .* 4 lanes of 2 samples"):
        Rank(Counted()).resumed(state)


@pytest.mark.parametrize(("dataset", "message"), [
    (Broken(), r"reading sample 5 of lane 0 of epoch 0 .* OSError: no such shard"),
    (Broken(state={"a": [object()]}),
     r"the state_dict\(\) at .* lane 0 .* TypeError: \['a'\]\[0\] is a builtins.object")])
def test_an_error_names_the_sample_and_the_lane(dataset, message):
    run = Rank(dataset)

    with pytest.raises(SampleError, match=message):
        [run.window() for _ in range(3)]


def rows(lane: int, count: int = 11) -> list[int]:
    return [100 * lane + place for place in range(count)]


def mixture(lane: int) -> Any:
    sources = {"a": IterableWrapper(rows(lane)), "b": IterableWrapper(rows(lane + 10, 5))}
    return MultiNodeWeightedSampler(sources, {"a": 2.0, "b": 1.0}, seed=lane, rank=0, world_size=1)


def sampled(lane: int, **options: Any) -> SamplerWrapper:
    return SamplerWrapper(RandomSampler(rows(lane), **options))


class Typed(Iterator[int]):
    """Its state is no JSON."""

    def __init__(self, lane: int) -> None:
        self._rows, self._place = rows(lane), torch.tensor(0)

    def __next__(self) -> int:
        if self._place == len(self._rows):
            raise StopIteration
        self._place += 1
        return self._rows[self._place - 1]

    def state_dict(self) -> dict[Any, Any]:
        return {"place": self._place, 1: (np.arange(2), b"x")}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert isinstance(state[1], tuple)
        self._place = state["place"]


class Sources(IterableDataset):
    """Lanes made by a function."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(0))

    def lane(self, number: int, lanes: int) -> Any:
        return self.make(number)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("make", [
    lambda lane: IterableWrapper(rows(lane)),
    lambda lane: Loader(IterableWrapper(rows(lane, 8))),  # at its end after step 4
    lambda lane: Mapper(sampled(lane), rows(lane).__getitem__),
    lambda lane: Loader(Prefetcher(ParallelMapper(
        sampled(lane, generator=torch.Generator().manual_seed(lane)), rows(lane).__getitem__,
        num_workers=2, snapshot_frequency=3), 2, snapshot_frequency=2)),
    lambda lane: iter(Loader(mixture(lane))),
    Typed,
    lambda lane: StatefulDataLoader(rows(lane), batch_size=None, shuffle=True),
], ids=["node", "loader", "sampler", "threads", "mixture", "typed", "stateful-dataloader"])
def test_a_source_continues_from_its_state_after_each_step(make):
    straight = attempt = Rank(Sources(make))
    windows = []
    for step in range(5):
        states = [rank.stream.state_dict() for rank in (straight, attempt)]
        windows.append(straight.window())
        for state in states if step else ():  # that of the straight run, and of a resumed one
            attempt = Rank(Sources(make), step=step).resumed(state)
            assert attempt.window() == windows[-1]

    assert len({sample for window in windows for lane in window.values() for sample in lane}) > 30
