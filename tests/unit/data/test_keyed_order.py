"""The keyed order: a permutation of any number of samples that needs no table."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from trainer.config.schema import Data
from trainer.data.order import LONGEST_TABLE, KeyedPermutation, Permutation, make_order
from trainer.data.sampler import BLOCK, BatchPlan, MicroBatchSampler
from trainer.errors import ConfigError

SIZES = sorted({*range(1, 1500), *(2**k + d for k in range(1, 15) for d in (-1, 0, 1)),
                *(3**k for k in range(9)), *range(1500, 25_000, 53)})  # fmt: skip


def test_the_keyed_order_is_a_bijection_for_any_number_of_samples() -> None:
    assert len(SIZES) > 1900
    for size in SIZES:
        found = KeyedPermutation(size, seed=size)(0, np.arange(size))
        assert np.array_equal(np.sort(found), np.arange(size)), size


def test_a_place_of_the_keyed_order_does_not_depend_on_the_block_it_is_computed_in() -> None:
    order, places = KeyedPermutation(10**12, seed=3), np.arange(5000) * 199_999_991

    together = order(2, places)

    assert np.array_equal(together, np.concatenate([order(2, places[i : i + 7])
                                                    for i in range(0, 5000, 7)]))
    assert together.max() < 10**12
    assert len(set(together.tolist())) == 5000


def test_the_keyed_order_looks_random() -> None:
    """Limits of about 5 standard deviations; the draws are fixed by their keys."""
    size, epochs = 1000, 400
    orders = np.stack([KeyedPermutation(size, seed=7)(epoch, np.arange(size))
                       for epoch in range(epochs)])

    assert abs((orders == np.arange(size)).sum(1).mean() - 1) < 0.25  # fixed points
    counts = np.bincount(orders[:, 0] // 100, minlength=10)  # where one place leads to
    assert ((counts - epochs / 10) ** 2 / (epochs / 10)).sum() < 34  # chi-square, 9 degrees
    neighbours = [np.corrcoef(one[:-1], one[1:])[0, 1] for one in orders]
    assert abs(np.mean(neighbours)) < 5 / np.sqrt(size * epochs)
    assert abs((np.abs(np.diff(orders)) == 1).mean() - 2 / size) < 0.0004
    across = [np.corrcoef(one, other)[0, 1] for one, other in itertools.pairwise(orders)]
    assert abs(np.mean(across)) < 5 / np.sqrt(size * epochs)


def test_the_keyed_order_of_10_to_the_12_samples_needs_no_memory() -> None:
    plan = BatchPlan(samples=10**12, global_size=4096, micro_size=64, drop_last=True)
    sampler = MicroBatchSampler(plan, rank=3, num_ranks=8, order=KeyedPermutation(10**12, 0),
                                position=10**6, total_steps=10**9)
    tracemalloc.start()
    window = [next(iter(sampler)) for _ in range(8)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert window[0].step == 10**6 + 1
    assert peak < 5 << 20


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_the_keyed_order_is_read_in_the_same_micro_batches_by_any_number_of_ranks(
    num_ranks: int,
) -> None:
    plan = BatchPlan(samples=3 * BLOCK + 40, global_size=512, micro_size=64, drop_last=False)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank in range(num_ranks):
        for spec in MicroBatchSampler(plan, rank=rank, num_ranks=num_ranks, position=5,
                                      order=KeyedPermutation(plan.samples, 1), total_steps=60):
            if spec.number >= 0:
                found[spec.step, spec.number] = spec.indices

    for step in range(6, 61):
        first, end = plan.window(step)
        expected = KeyedPermutation(plan.samples, 1)(plan.epoch_of(step), np.arange(first, end))
        numbers = range(plan.micro_batches(step))
        assert sum((found.pop((step, n)) for n in numbers), ()) == tuple(expected.tolist())
    assert not found


class Sized(list[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Heavy:
    """Draws each sample with a weight, from (seed, epoch, place)."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return 2 * len(self.dataset)

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return (places * (epoch + 2)) % len(self.dataset)


class Wrong(Heavy):
    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return places


class Drawn(Heavy):
    """A permutation of each epoch, drawn when it begins: a resumed run would draw the first."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        super().__init__(dataset, seed)
        self.generator, self.tables = np.random.default_rng(seed), dict[int, np.ndarray]()

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if epoch not in self.tables:
            self.tables[epoch] = self.generator.permutation(len(self.dataset))
        return self.tables[epoch][places % len(self.dataset)]


class Keyed(Heavy):
    """The same, as a function of seed and epoch."""

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        table = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        return table[places % len(self.dataset)]


class Sorted(Heavy):
    """Depends on which places are asked together."""

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return (places - places[0]) // 2


class Iterated(list[int]):
    """As a sampler of torch, by `__iter__`."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        super().__init__(range(len(dataset)))


@pytest.mark.parametrize(("settings", "size", "kind"), [
    ({}, LONGEST_TABLE, Permutation), ({}, LONGEST_TABLE + 1, KeyedPermutation),
    ({"order": "permutation"}, LONGEST_TABLE + 1, Permutation),
    ({"order": "keyed"}, 2, KeyedPermutation)])
def test_auto_is_a_keyed_order_for_many_samples(settings, size, kind) -> None:
    assert type(make_order(Data(**settings), Sized(size), 0)) is kind


def test_an_order_of_the_user_is_called_with_epoch_and_places_and_checked() -> None:
    heavy, keyed = (make_order(Data(sampler=f"{__name__}:{name}"), Sized(5), 0)
                    for name in ("Heavy", "Keyed"))

    assert len(heavy) == 10
    assert heavy(1, np.arange(10)).tolist() == [0, 3, 1, 4, 2, 0, 3, 1, 4, 2]
    assert sorted(keyed(1, np.arange(5))) == [*range(5)]
    with pytest.raises(ConfigError, match=r"remove --data.order and --data.shuffle"):
        make_order(Data(sampler=f"{__name__}:Heavy", shuffle="off"), Sized(5), 0)


@pytest.mark.parametrize(("name", "message"), [
    ("Wrong", "for 10 places .* from 0 to 4"), ("Drawn", "a second object returned other samples"),
    ("Sorted", "a second object returned other"), ("Iterated", "Iterated can't be called with"),
    ("LONGEST_TABLE", "int can't be called with")])
def test_an_order_that_is_no_function_of_epoch_and_places_is_refused(name, message) -> None:
    with pytest.raises(ConfigError, match=f"--data.sampler .*{name}: {message}"):
        make_order(Data(sampler=f"{__name__}:{name}"), Sized(5), 0)
