"""The orders shipped for --data.sampler: functions of (seed, epoch, place)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from trainer.config.schema import SAMPLERS, Data
from trainer.data.map_dataset import KeyedSamples, Limited
from trainer.data.order import SHIPPED, UserOrder, make_order
from trainer.data.sampler import BatchPlan, MicroBatchSampler
from trainer.errors import ConfigError
from trainer.tasks.text import Text


def samples(count: int, **attributes: Any) -> Any:
    """A data set of the numbers below `count`."""
    data = TensorDataset(torch.arange(count))
    vars(data).update(attributes)
    return data


def order_of(name: str, data: Any, *, seed: int = 3, **task: Any) -> UserOrder:
    order = make_order(Data(sampler=name), data, seed, task=SimpleNamespace(**task), micro_size=8)
    assert isinstance(order, UserOrder)
    return order


LENGTHS = np.random.default_rng(0).integers(5, 201, 1700)
ORDERS = {
    "weighted": lambda: samples(50, weights=[0.0, *range(1, 49), 0.0]),
    "balanced": lambda: samples(60, targets=[0] * 40 + [1] * 15 + [2] * 5),
    "like-length": lambda: samples(1700, lengths=LENGTHS),
    "mixture": lambda: mixture(1, 0.5, 0.5),
}


def mixture(*weights: float) -> Any:
    data = ConcatDataset([samples(100), samples(40), samples(10)])
    vars(data)["weights"] = weights
    return data


def test_each_name_of_the_flag_is_shipped() -> None:
    assert tuple(SHIPPED) == SAMPLERS == tuple(ORDERS)


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_is_a_function_of_seed_epoch_and_place(name: str) -> None:
    data = ORDERS[name]()
    places = np.arange(len(data))
    order = order_of(name, data)
    whole = [order(epoch, places) for epoch in (0, 1, 2)]

    fresh = order_of(name, data)
    some = np.random.default_rng(1).permutation(places)[:40]
    assert (fresh(2, some) == whole[2][some]).all(), "asked for at once, in any order"
    assert [fresh(1, places[p : p + 1])[0] for p in some] == whole[1][some].tolist()
    assert (whole[0] != whole[1]).any()
    assert (order_of(name, data, seed=4)(0, places) != whole[0]).any()
    assert order.facts == fresh.facts != ""


def test_weighted_and_balanced_draw_in_proportion() -> None:
    places = np.arange(50_000)  # beyond an epoch: the draws are independent

    drawn = np.bincount(order_of("weighted", ORDERS["weighted"]())(0, places), minlength=50)
    expected = places.size * np.array([0, *range(1, 49), 0]) / sum(range(49))
    assert drawn[0] == drawn[49] == 0
    assert (((drawn - expected) ** 2)[1:49] / expected[1:49]).sum() < 86  # chi-square: 1 in 2000

    data = ORDERS["balanced"]()
    classes = np.array(data.targets)[order_of("balanced", data)(5, places)]
    assert abs(np.bincount(classes) / places.size - 1 / 3).max() < 0.01
    whole = order_of("balanced", Subset(ConcatDataset([data, data]), range(0, 120, 2)))(0, places)
    own = order_of("balanced", samples(60), labels=lambda data: ["a"] * 50 + ["b"] * 10)(0, places)
    assert np.ptp(np.bincount(np.array(2 * data.targets)[:120:2][whole])) < 1000
    assert abs((own >= 50).mean() - 0.5) < 0.01


@pytest.mark.parametrize("count", [1700, 512, 100, 7])
def test_batches_of_like_length_hold_each_sample_once(count: int) -> None:
    order = order_of("like-length", samples(count, lengths=LENGTHS[:count]))
    last = set()
    for epoch in range(20):
        found = order(epoch, np.arange(count))
        assert sorted(found) == list(range(count))
        last |= set(found[count - count % 8 :].tolist())

    # What drop_last leaves out is of any length, not the longest samples each time.
    assert len(last) > 1.5 * (count % 8) or count % 8 in (0, count)
    lengths = LENGTHS[order(0, np.arange(count))][: count // 8 * 8].reshape(-1, 8)
    assert lengths.sum() >= (1 - 2 * 8 / min(count, 512)) * (8 * lengths.max(1)).sum()


def test_a_mixture_has_its_shares_in_each_epoch_and_goes_through_each_part() -> None:
    order = order_of("mixture", mixture(1, 0.5, 0.5))
    seen = Counter[int]()
    for epoch in range(8):
        found = order(epoch, np.arange(150))
        counts = np.bincount(np.searchsorted([100, 140], found, side="right"))
        assert counts.tolist() == [75, 38, 37]
        seen.update(found.tolist())

    for part, drawn in ((range(100), 75), (range(100, 140), 38), (range(140, 150), 37)):
        times = [seen[index] for index in part]
        assert sum(times) == 8 * drawn
        assert max(times) - min(times) <= 1, "all of it before any sample comes again"


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return int(super().__getitem__(index)[0]), float(torch.rand(()))


def test_copies_of_a_sample_have_random_draws_of_their_own() -> None:
    data: Any = Noisy(torch.arange(4))
    data.weights = [1, 0, 0, 0]
    plan = BatchPlan(samples=8, global_size=8, micro_size=8, drop_last=True)
    sampler = MicroBatchSampler(plan, rank=0, num_ranks=1, position=0, total_steps=1,
                                order=order_of("weighted", data))
    [spec] = sampler
    reader = KeyedSamples(data, seed=0)

    numbers, draws = reader[spec].batch
    again = reader[dataclasses.replace(spec, indices=spec.indices[5:])].batch

    assert numbers.tolist() == [0] * 8
    assert len(set(draws.tolist())) == 8
    assert torch.equal(again[1], draws[5:])


@pytest.mark.parametrize(("name", "data", "message"), [
    ("weighted", samples(4), r"have no weights; define weights\(dataset\) in the task, or an att"),
    ("weighted", samples(4, weights=[1, 2]), r"weights, of shape \(2,\), don't fit; return 4"),
    ("weighted", samples(2, weights=[1, -2]), r"don't fit; return 2 finite numbers"),
    ("weighted", samples(2, weights=[1, float("nan")]), r"don't fit"),
    ("weighted", samples(2, weights=[0, 0]), r"the sum of all weights is 0.0; make it positive"),
    ("weighted", samples(2, weights=["a", "b"]), r"weights are no numbers"),
    ("balanced", samples(4), r"have no labels; define labels\(dataset\)"),
    ("balanced", samples(4, targets=[1]), r"labels, of shape \(1,\), don't fit; return 4 values"),
    ("like-length", samples(4), r"have no lengths; .*: the length of each sample"),
    ("mixture", samples(4), r"are a TensorDataset; return a torch.utils.data.ConcatDataset"),
    ("mixture", mixture(1, 1), r"weights, of shape \(2,\).* 3 finite .* each of its data sets"),
    ("mixture", mixture(0, 0, 0), r"sum of all weights is 0"),
])
def test_what_is_missing_is_named_with_the_remedy(name: str, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--data.sampler {name}: .*{message}"):
        order_of(name, data)


def test_a_limit_leaves_the_task_its_own_data_set_and_a_mixture_is_refused() -> None:
    some = Limited(samples(60, spread=[0] * 10 + [1] * 50), range(20))
    order = order_of("balanced", some, labels=lambda data: data.spread)

    assert set(order(0, np.arange(200)).tolist()) <= set(range(20))
    with pytest.raises(ConfigError, match=r"--data.limit: .*mixture"):
        order_of("mixture", Limited(mixture(1, 0.5, 0.5), range(20)))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"use weighted, balanced, like-length, mixture, or your"):
        Data(sampler="wieghted")


def test_pieces_of_a_text_have_all_its_bytes_and_unequal_lengths(tmp_path: Any) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(np.random.default_rng(0).integers(1, 256, 50_000, dtype=np.uint8)))
    task = Text(file=str(file), context=200, shortest=5, validation_fraction=0.0)
    data: Any = task.dataset("train")

    assert data.lengths.sum() == 49_999
    assert (data.lengths[:-1].min(), data.lengths.max()) == (5, 200)
    text = b"".join(bytes(data[i][0].tolist()) for i in range(len(data)))
    assert text == file.read_bytes()[:-1]
    inputs, targets = data.__getitems__([1, 0])
    assert inputs.shape[1] == data.lengths[:2].max()
    assert (targets >= 0).sum(1).tolist() == data.lengths[[1, 0]].tolist()
    with pytest.raises(ConfigError, match=r"task.shortest 300: use at most --task.context 200"):
        Text(context=200, shortest=300)
