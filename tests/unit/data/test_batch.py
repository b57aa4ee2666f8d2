"""Map, stack, copy and move batches of any nesting."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.data import batch
from trainer.run.proof import content


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
def test_stacked_and_cut_batches_keep_the_nesting(make):
    samples = [make(torch.full((2,), i, dtype=torch.int32)) for i in range(3)]

    stacked = batch.collate(samples)
    cut = batch.rows(stacked, 3, [2, 0])

    assert type(stacked) is type(cut) is type(samples[0])
    columns = [torch.stack(found) for found in zip(*map(batch.tensors, samples), strict=True)]
    assert columns
    for column, one, two in zip(columns, *map(batch.tensors, (stacked, cut)), strict=True):
        assert torch.equal(one, column)
        assert torch.equal(two, column[[2, 0]])


X = torch.arange(6).reshape(2, 3)
BOXES = [torch.ones(1, 4), torch.ones(5, 4)]


@pytest.mark.parametrize(("given", "first"), [
    ((X, [{"boxes": b} for b in BOXES]), (X[:1], [{"boxes": BOXES[0]}])),
    ({"x": X, "names": ["a", "b"], "ids": (7, 8), "size": 3, "scale": torch.ones(())},
     {"x": X[:1], "names": ["a"], "ids": (7,), "size": 3, "scale": torch.ones(())}),
    (({"x": X}, {"y": X + 1}), ({"x": X[:1]}, {"y": X[:1] + 1})),  # not two samples
    ([X, BOXES], [X[:1], BOXES[:1]]),
    ((X, torch.ones(6)), None), ((X, {1}), None), ({"x": X, "names": ["a"]}, None)])
def test_samples_are_cut_out_of_batches_with_a_row_or_an_entry_of_each(given, first):
    if first is None:
        with pytest.raises(ValueError, match="not one row per sample"):
            batch.rows(given, 2, [0])
    else:
        assert content(batch.rows(given, 2, [0])) == content(first)


@pytest.mark.parametrize(("samples", "message"), [
    ([{"ids": [1, 2]}, {"ids": [1]}], "different lengths, such as 1 and 2, .* collate"),
    ([{"x": np.ones((2, 2))}, {"x": np.ones((2, 1))}], r"\(2, 1\) and \(2, 2\), .* collate"),
    ([(1, None), (1, None)], "found <class 'NoneType'>"),
    ([np.array([1, "a"], object)] * 2, "numpy.object_")])
def test_unstackable_samples_are_refused_with_the_reason(samples, message):
    with pytest.raises((ValueError, TypeError), match=message):
        batch.collate(samples)


class Graph:
    """An object with tensors, which moves and pins itself."""

    def __init__(self, x: Tensor, at: str = "") -> None:
        self.x, self.at = x, at

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device), f"on {device.type}")

    def pin_memory(self) -> Graph:
        return Graph(self.x, "pinned")


@dataclasses.dataclass
class Molecule(Graph):
    """A dataclass with methods: they come before its fields."""

    x: Tensor
    at: str = ""


@pytest.mark.parametrize("one", [Graph(torch.ones(2)), Molecule(torch.ones(2))])
def test_an_object_moves_and_pins_itself_wherever_it_lies(one):
    nested = {"deep": [(one, "name")]}

    for change, at in ((lambda b: batch.to_device(b, torch.device("meta")), "on meta"),
                       (batch.pin_memory, "pinned")):
        changed, name = change(nested)["deep"][0]
        assert (changed.at, name) == (at, "name")


@pytest.mark.parametrize(("given", "found"), [
    ({"x": torch.ones(2), "names": ["a", "b"], "size": 3, "none": None}, False),
    ([torch.ones(2), (np.float32(1), b"")], False),
    ((torch.ones(2), Graph(torch.ones(2))), True), ([{1}], True), (np.ones(2), True)])
def test_objects_are_found_at_any_depth(given, found):
    assert batch.has_objects(given) is found


@pytest.mark.parametrize("change", [
    lambda b: b["x"].add_(1), lambda b: b.pop("x"), lambda b: b.update(x=b["x"] + 1)])
def test_a_change_of_a_batch_shows_in_its_versions(change):
    given = {"x": torch.ones(2), "y": torch.ones(2)}
    before = batch.versions(given)

    change(given)

    assert batch.versions(given) != before


def test_a_copy_shares_no_memory_and_keeps_graphs():
    leaf = torch.ones(2, requires_grad=True)
    given = {"x": torch.ones(2, 2).t(), "y": np.ones(2), "leaf": leaf, "grown": leaf * 2,
             "graph": Graph(torch.ones(1000)[:2]), "own": Graph(leaf * 2)}

    own = batch.copy_of(given)

    given["x"].zero_()
    given["y"][:] = 0
    given["graph"].x.zero_()
    assert own["x"].sum() == 4
    assert own["y"].sum() == own["graph"].x.sum() == 2
    assert own["leaf"] is leaf
    assert own["grown"] is given["grown"]
    assert own["own"].x is given["own"].x
    assert own["graph"].x.untyped_storage().nbytes() == 8, "not that of the whole storage"
