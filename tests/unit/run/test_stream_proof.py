"""The states of streams are tried at the start: which are exact, and what the wrong ones do."""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper, Loader, ParallelMapper
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer.data.stream_reader import StreamSpec
from trainer.errors import ConfigError
from trainer.run import stream_proof
from trainer.run.stream_proof import DIFFERS, StreamProof, prove_stream, reach, remedies

EPOCHS = [0]
PLACES: collections.Counter[int] = collections.Counter()


class Lanes(IterableDataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def set_epoch(self, epoch: int) -> None:
        EPOCHS.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(0))

    def lane(self, number: int, lanes: int) -> Any:
        return self.make(number)


class Source(Iterator[Any]):
    """The base of the wrong ones: an exact position."""

    size = 1000

    def __init__(self, lane: int) -> None:
        self.lane, self.place = lane, 0

    def __next__(self) -> Any:
        if self.place >= self.size:
            raise StopIteration
        self.place += 1
        return self.lane, self.place - 1, {"text": "a"}, None

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


class Drawing(Source):
    def __next__(self) -> Any:
        return *super().__next__(), random.random(), np.random.rand(), torch.rand(1)


class Uneven(Source):
    @property
    def size(self) -> int:  # type: ignore[override]
        return 6 + 20 * self.lane


class Live(Source):
    """Returns and keeps the same dict."""

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.state = {"place": 0}

    def state_dict(self) -> Any:
        self.state["place"] = self.place
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state, self.place = state, state["place"]


class Buffered(Source):
    """Shuffles in a buffer, which is a part of the state."""

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.buffer: list[Any] = []

    def __next__(self) -> Any:
        while len(self.buffer) < 40 and self.place < self.size:
            self.buffer.append(super().__next__())
        if not self.buffer:
            raise StopIteration
        return self.buffer.pop(random.randrange(len(self.buffer)))

    def state_dict(self) -> Any:
        return {"place": self.place, "buffer": self.buffer}

    def load_state_dict(self, state: Any) -> None:
        self.place, self.buffer = state["place"], state["buffer"]


class Shuffled(Source):
    """Its order is that of the epoch, and so is a state of its epoch."""

    size = 40

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.epoch = EPOCHS[-1]

    def __next__(self) -> Any:
        lane, place, *rest = super().__next__()
        return lane, (7 * place + 13 * self.epoch) % self.size, *rest


class OwnEpochs(Shuffled):
    """Counts the epochs itself."""

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.epoch = PLACES[lane]
        PLACES[lane] += 1


class Spoils(Shuffled):
    """The next epoch begins where a state was loaded."""

    def __init__(self, lane: int) -> None:
        super().__init__(lane)
        self.place = PLACES[lane]

    def load_state_dict(self, state: Any) -> None:
        self.place = PLACES[self.lane] = state["place"]


class StillAfterALoad(Source):
    loaded = False

    def state_dict(self) -> Any:
        return {"place": self.first if self.loaded else self.place}

    def load_state_dict(self, state: Any) -> None:
        self.loaded, self.place, self.first = True, state["place"], state["place"]


class Elsewhere(Source):
    """Its position is not in the source."""

    def __next__(self) -> Any:
        self.place = PLACES[self.lane]
        PLACES[self.lane] += 1
        return super().__next__()

    def load_state_dict(self, state: Any) -> None:
        pass


class Unloadable(Source):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("epoch")


class Unseeded(Source):
    def __next__(self) -> Any:
        return *super().__next__(), os.urandom(4)


def saving(state: Callable[[Any], Any], base: type[Source] = Source) -> type[Source]:
    """A source with another state."""
    return type(base.__name__, (base,), {"state_dict": state})


def load_as_epoch_0(self: Any, state: Any) -> None:
    self.place, self.epoch = state["place"], 0


Short = type("Short", (Source,), {"size": 12})
Long = type("Long", (Source,), {"size": 10**9})
FirstEpoch = type("FirstEpoch", (Shuffled,), {"load_state_dict": load_as_epoch_0})


def behind(source: Any) -> Any:
    return {"place": max(0, source.place - 1)}


def unstorable(source: Any) -> Any:
    return {"generator": torch.Generator()}


def nodes(source: type[Source]) -> Callable[[int], Any]:
    return lambda lane: Loader(ParallelMapper(
        IterableWrapper(source(lane)), str, num_workers=2, snapshot_frequency=500))


def unordered(lane: int) -> Any:
    def work(place: int) -> int:
        time.sleep(0.004 * (os.urandom(1)[0] % 2))
        return place

    return Loader(ParallelMapper(IterableWrapper(range(200)), work, num_workers=4, in_order=False))


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    monkeypatch.setattr(stream_proof, "READ_S", 60.0)
    monkeypatch.setattr(stream_proof, "ALL_S", 60.0)


def prove(dataset: Any, *, lanes: int = 2, daemon: bool = False) -> StreamProof:
    spec = StreamSpec(dataset=dataset, lanes=lanes, micro_size=4, seed=1)
    return prove_stream(spec, [0], daemon=daemon)


@pytest.mark.parametrize("make", [
    Source, Drawing, Short, Uneven, Live, Buffered, Shuffled, iter,
    lambda lane: (torch.rand(2) for _ in range(100)),
    lambda lane: Loader(IterableWrapper(range(12)))])
def test_a_source_that_brings_back_its_samples_is_exact(make):
    proof = prove(Lanes(make if make is not iter else lambda lane: iter(range(lane, 10**12))))

    assert (proof.problem, proof.unlike, proof.usable) == ("", "", True)


@pytest.mark.parametrize(("make", "reached"), [
    (Long, "tried up to sample 2,000 of epoch 0 (not its end) and 8 of epoch 1"),
    (Short, "tried up to sample 12 of epoch 0 (its end) and 8 of epoch 1"),
    (lambda lane: iter(range(lane, 40)), "")])
def test_how_far_the_states_were_tried_is_told(make, reached):
    assert reach([prove(Lanes(make)), prove(Lanes(make))]) == reached


@pytest.mark.parametrize(("dataset", "problem"), [
    (Lanes(saving(lambda source: {"place": 0})),
     "after 4 samples of lane 0 of the training stream continues at sample 0"),
    (Lanes(StillAfterALoad), "after 8 samples .* continues at sample 4"),
    (Lanes(saving(behind)), "after 4 samples .* continues at sample 3"),
    (Lanes(saving(lambda source: {"place": source.place % 256})),
     "after 300 samples .* continues at sample 44"),
    (Lanes(saving(lambda source: {"place": source.place, "buffer": []}, Buffered)),
     "after 4 samples .* brings back another sample 4"),
    (Lanes(Elsewhere), "after 4 samples .* continues at sample 0"),
    (Lanes(nodes(saving(behind, Long))), "after 2000 samples .* continues at sample 1999"),
    (Lanes(FirstEpoch), "after 4 samples of lane 0 of epoch 1 .* continues at sample 4 of epoch 0"),
    (Lanes(Spoils), "after 40 samples .* next epoch: epoch 1 brings back only 0 of the samples"),
    (Lanes(saving(lambda source: {"place": source.place % source.size}, Shuffled)),
     "after 40 samples .* continues at sample 0"),
    (Lanes(saving(unstorable)), r"\['generator'\] is a torch._C.Generator, which can't be saved"),
    (Lanes(Unloadable), "after 4 samples .* can't be continued: .* KeyError: 'epoch'"),
])
def test_a_wrong_state_is_named_and_reading_through_is_exact(dataset, problem):
    proof = prove(dataset)

    assert not proof.unlike
    assert proof.usable == ("can't" not in problem)
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(proof.problem)


@pytest.mark.parametrize("make", [
    Unseeded, saving(unstorable, Unseeded), lambda lane: iter([os.urandom(4)] * 20), unordered])
def test_an_order_that_is_not_reproducible_is_found(make):
    assert prove(Lanes(make)).unlike == DIFFERS
    assert "use --data.stream-resume read-through" in remedies(usable=False, unlike=DIFFERS)


def test_epochs_that_a_source_counts_itself_are_found():
    assert "epoch 1 of the training stream has other samples" in prove(Lanes(OwnEpochs)).unlike


def test_a_slow_or_broken_source_takes_no_longer_than_its_first_windows(monkeypatch):
    monkeypatch.setattr(stream_proof, "READ_S", 0.5)
    monkeypatch.setattr(stream_proof, "ALL_S", 0.0)

    class Slow(saving(lambda source: {"place": 0})):  # type: ignore[misc]
        def __next__(self) -> Any:
            time.sleep(0.07)
            return super().__next__()

    class Broken(Source):
        def __next__(self) -> Any:
            if self.place == 6:
                raise OSError("no such shard")
            return super().__next__()

    assert "continues at sample 0" in prove(Lanes(Slow)).problem
    assert prove(Lanes(Broken)).problem == ""  # the run reports it when it gets there


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_source_with_processes_is_refused_in_loader_processes():
    def make(lane: int) -> Any:
        return StatefulDataLoader(range(40), batch_size=None, num_workers=1)

    assert prove(Lanes(make)).problem == ""
    with pytest.raises(ConfigError, match=r"daemonic.*use --data.workers 0"):
        prove(Lanes(make), daemon=True)
