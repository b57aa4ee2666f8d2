"""Map, stack, measure and empty batches of any nesting."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.data import batch


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    names: Any = None
    size: int = dataclasses.field(init=False, default=7)


NESTINGS = [
    lambda t: t,
    lambda t: (t, t + 1),
    lambda t: [t, (t + 1, t + 2)],
    lambda t: {"x": t, "deep": {"y": [t + 1]}},
    lambda t: OrderedDict(x=t, y=t + 1),
    lambda t: defaultdict(list, x=t),
    lambda t: UserDict(x=t),
    lambda t: Pair(t, {"y": t + 1}),
    lambda t: Record(t, Pair(t, t + 1)),
    lambda t: {"a": Record(t, t), "b": (Pair(t, [t]),)}]


@pytest.mark.parametrize("make", NESTINGS)
def test_mapped_stacked_and_empty_batches_keep_the_nesting(make):
    samples = [make(torch.full((2,), i, dtype=torch.int32)) for i in range(3)]

    stacked = batch.collate(samples)
    mapped = batch.map_tensors(lambda t: t * 10, stacked)
    empty = batch.empty(stacked)

    assert type(stacked) is type(mapped) is type(empty) is type(samples[0])
    assert (batch.size(stacked), batch.size(empty)) == (3, 0)
    columns = [torch.stack(found) for found in zip(*map(batch.tensors, samples), strict=True)]
    assert columns
    for kind in zip(columns, *map(batch.tensors, (stacked, mapped, empty)), strict=True):
        column, one, tenfold, none = kind
        assert torch.equal(one, column)
        assert torch.equal(tenfold, 10 * column)
        assert (none.shape, none.dtype) == ((0, *column.shape[1:]), column.dtype)


def test_numbers_become_tensors_and_strings_a_list():
    stacked = batch.collate([{"n": 1, "f": 0.5, "s": "a"}, {"n": 2, "f": 1.5, "s": "b"}])

    assert stacked["n"].tolist() == [1, 2]
    assert stacked["f"].dtype == torch.float64
    assert stacked["s"] == ["a", "b"]


@pytest.mark.parametrize(("samples", "message"), [
    ([{"ids": [1, 2]}, {"ids": [1]}], "different lengths, such as 1 and 2, .* collate"),
    ([{"x": np.ones((2, 2))}, {"x": np.ones((2, 1))}], r"\(2, 1\) and \(2, 2\), .* collate"),
    ([(1, None), (1, None)], "found <class 'NoneType'>"),
    ([np.array([1, "a"], object)] * 2, "numpy.object_")])
def test_unstackable_samples_are_refused_with_the_reason(samples, message):
    with pytest.raises((ValueError, TypeError), match=message):
        batch.collate(samples)


@pytest.mark.parametrize(("full", "read"), [
    ({"names": ["a", "b"]}, lambda e: e["names"]),
    ((torch.ones(2), ["a", "b"]), lambda e: e[1]),
    (Pair(torch.ones(2), ["a", "b"]), lambda e: e.y),
    (Record(torch.ones(2), {"deep": (["a", "b"],)}), lambda e: e.names["deep"][0])])
def test_lists_of_strings_are_emptied_too(full, read):
    assert read(batch.empty(full)) == []


def test_a_scalar_that_belongs_to_the_whole_batch_stays_in_an_empty_one():
    empty = batch.empty({"x": torch.ones(2, 3), "scale": torch.tensor(2.0), "kind": "train"})

    assert empty["scale"] == 2
    assert empty["kind"] == "train"


def test_a_copy_shares_no_memory_and_keeps_graphs():
    leaf = torch.ones(2, requires_grad=True)
    given = {"x": torch.ones(2, 2).t(), "y": np.ones(2), "leaf": leaf, "grown": leaf * 2}

    own = batch.copy_of(given)

    given["x"].zero_()
    given["y"][:] = 0
    assert own["x"].sum() == 4
    assert own["y"].sum() == 2
    assert own["leaf"] is leaf
    assert own["grown"] is given["grown"]
