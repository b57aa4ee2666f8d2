"""Reading a map-style data set: each sample has its own key, also in subsets."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import data
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from trainer.data.map_dataset import KeyedSamples, shared_samples
from trainer.data.sample_errors import SampleError
from trainer.data.sampler import MicroBatchSpec
from trainer.data.workers import DataReader


class Plain(Dataset):
    """Sample i is (i, epoch, a draw)."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[int, int, float]:
        assert type(index) is int
        return index, self.epoch, torch.rand((), dtype=torch.float64).item()


class Batched(Plain):
    """The same in batches, with the keys instead of draws, or -1 without keys."""

    def __getitems__(self, indices: Any) -> list[tuple[int, int, int]]:
        keys = indices.keys if hasattr(indices, "keys") else np.full(len(indices), -1)
        return [(i, self.epoch, int(k) >> 1) for i, k in zip(indices, keys, strict=True)]


class Doubled(Subset):
    """A subset that does more than select samples."""

    def __getitem__(self, index: int) -> Any:
        number, epoch, drawn = self.dataset[self.indices[index]]
        return 2 * number, epoch, drawn

    def __getitems__(self, indices: Any) -> list[Any]:
        return [(*self[index][:2], int(key) >> 1)
                for index, key in zip(indices, indices.keys, strict=True)]


def read(dataset: Any, *places: int, epoch: int = 3) -> list[list[float]]:
    """[index, epoch, draw] of each sample of one micro-batch."""
    samples = KeyedSamples(dataset, seed=1)
    columns = samples[MicroBatchSpec(1, epoch, 0, True, places)].batch
    return torch.stack([c.double() for c in columns], 1).tolist()


@pytest.mark.parametrize("kind", [Plain, Batched])
@pytest.mark.parametrize("indices", [
    ([7, 5, 3, 1],), (torch.tensor([7, 5, 3, 1]),), (range(7, 0, -2),),
    ([9, 7, 1, 5, 3], [1, 3, 4, 2])])
def test_samples_of_a_subset_are_keyed_by_their_position_in_it(kind, indices):
    subset = functools.reduce(Subset, indices, kind())  # also within another one

    found = read(subset, 2, 0)

    assert [row[:2] for row in found] == [[3, 3], [7, 3]]
    assert found == read(subset, 2) + read(subset, 0), "whatever else is in the micro-batch"
    direct = read(kind(), 2, 0)
    assert [row[2] for row in found] == [row[2] for row in direct]


@pytest.mark.parametrize("kind", [Plain, Batched])
def test_a_subset_that_does_more_than_select_is_read_itself(kind):
    subset = Doubled(kind(), [5, 4])

    found = read(subset, 0, 1)

    assert [row[:2] for row in found] == [[10, 3], [8, 3]], "the epoch reaches what is inside"
    assert [row[2] for row in found] == [row[2] for row in read(Batched(), 0, 1)]


def test_samples_that_are_left_out_by_getitems_are_an_error():
    class Fewer(Dataset):
        def __len__(self) -> int:
            return 9

        def __getitems__(self, indices: Any) -> list[int]:
            return [index for index in indices if index != 4]

    with pytest.raises(SampleError, match=r"sample 4 .* called with 1 indices and returned 0"):
        KeyedSamples(Fewer(), seed=1)[MicroBatchSpec(1, 0, 0, True, (3, 4, 5))]


@pytest.mark.parametrize("join", [
    lambda one, other: ConcatDataset([one, other]), lambda one, other: StackDataset(one, other),
    lambda one, other: StackDataset(a=one, b=Subset(other, [*range(12)]))])
def test_combined_data_sets_get_set_epoch(join):
    one, other = Plain(), Plain()

    KeyedSamples(join(one, other), seed=1)[MicroBatchSpec(9, 4, 0, True, (0,))]

    assert one.epoch == other.epoch == 4


def test_each_reader_of_a_shared_data_set_sets_its_epoch():
    whole = Plain()
    one, other = (KeyedSamples(part, seed=1) for part in data.random_split(whole, [6, 6]))

    read = [reader[MicroBatchSpec(1, epoch, 0, True, (0,))].batch[1].item()
            for reader, epoch in [(one, 3), (other, 0), (one, 3), (one, 3), (other, 1), (other, 0)]]

    assert read == [3, 0, 3, 3, 1, 0]


class Shuffling(Plain):
    """Draws the order of an epoch, from each kind of generator."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        draws = torch.rand(12).double().numpy() + np.random.rand(12) + self.own.random(12)
        self.order = np.argsort(draws)

    def __getitem__(self, index: int) -> int:
        return int(self.order[index])


class Reseeded(Plain):
    """Creates a new generator in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.own = np.random.default_rng(epoch)

    def __getitem__(self, index: int) -> float:
        return self.own.random()


def test_a_generator_created_in_set_epoch_is_keyed_too():
    straight, later = (KeyedSamples(Reseeded(), seed=1) for _ in "12")
    for spec in (MicroBatchSpec(1, 0, 0, True, (0, 1)), MicroBatchSpec(2, 1, 0, True, (2, 3))):
        straight[spec]
    spec = MicroBatchSpec(3, 1, 0, True, (4, 5))

    assert torch.equal(straight[spec].batch, later[spec].batch)


def test_random_draws_in_set_epoch_are_keyed():
    whole = tuple(range(12))
    orders = [KeyedSamples(Shuffling(),
                           seed=seed)[MicroBatchSpec(1, epoch, 0, True, whole)].batch.tolist()
              for seed, epoch in [(1, 2), (1, 2), (1, 3), (2, 2)]]

    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert KeyedSamples(Shuffling(), seed=1).sample(0) in whole, "set_epoch comes first"


class Refilling(Dataset):
    """Fills the same buffer for each batch, or several buffers in turn."""

    def __init__(self, buffers: int) -> None:
        self.rows = torch.arange(24.0).view(12, 2)
        self.buffers, self.reads = torch.zeros(buffers, 2, 2), 0

    def __len__(self) -> int:
        return 12

    def collate(self, indices: list[int]) -> Any:
        buffer = self.buffers[self.reads % len(self.buffers)]
        self.reads += 1
        buffer.copy_(self.rows[list(indices)])
        return buffer, buffer.numpy()

    __getitems__ = collate


class Indexed(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("collated", [False, True])
def test_a_batch_keeps_its_values_when_its_memory_is_filled_again(buffers, collated, workers):
    filled = Refilling(buffers)
    samples = KeyedSamples(Indexed(), seed=1, collate=filled.collate) if collated else (
        KeyedSamples(filled, seed=1))
    specs = [MicroBatchSpec(1, 0, n, n == 5, (2 * n, 2 * n + 1)) for n in range(6)]
    reader = DataReader(samples, sampler=specs, workers=workers, prefetch=6,
                        device=torch.device("cpu"))

    batches = [micro.batch for micro in reader]

    reader.close()
    for column in range(2):
        assert np.array_equal(np.concatenate([batch[column] for batch in batches]), filled.rows)


def test_other_attributes_of_a_batch_are_kept():
    def packed(samples: list[torch.Tensor]) -> PackedSequence:
        return pack_sequence([torch.arange(n + 1.0) for n in samples], enforce_sorted=False)

    batch = KeyedSamples(range(12), seed=1, collate=packed)[
        MicroBatchSpec(1, 0, 0, True, (3, 4))].batch

    assert type(batch) is PackedSequence
    assert torch.equal(batch.data, packed([3, 4]).data)


def points(seed: int, count: int = 300) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.zeros(count))


WHOLE = points(0)


@pytest.mark.parametrize(("train", "validation", "shared"), [
    (Subset(WHOLE, range(200)), Subset(WHOLE, range(200, 300)), 0),
    (Subset(WHOLE, range(250)), Subset(WHOLE, range(200, 300)), 50),
    (Subset(points(0), range(200)), Subset(points(0), range(200)), 0),  # of two data sets
    (points(0), points(1), 0), (points(0), points(0), 300), (points(0), points(0, 9), 0),
    (points(0), None, 0)])
def test_validation_samples_among_the_training_samples_are_counted(train, validation, shared):
    assert shared_samples(train, validation).startswith(f"{shared} of" if shared else "")
    assert bool(shared_samples(train, validation)) == bool(shared)
