"""Random generators inside objects of the user: search and keys."""

from __future__ import annotations

import collections
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import test_generators
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainer import rng


class Draws(Dataset):
    """A data set that holds a generator."""

    def __init__(self, generator: object) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4


class Slotted:
    """A class without `__dict__`."""

    __slots__ = ("__generator",)

    def __init__(self, generator: object) -> None:
        self.__generator = generator


GENERATORS = {
    "python": (random.Random, lambda g: g.random()),
    "torch": (torch.Generator, lambda g: torch.rand((), generator=g).item()),
    "PCG64": (lambda: np.random.default_rng(), lambda g: g.random()),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937()), lambda g: g.random()),
    "Philox": (lambda: np.random.Generator(np.random.Philox()), lambda g: g.random()),
    "bits": (np.random.PCG64, lambda g: g.random_raw()),
    "RandomState": (np.random.RandomState, lambda g: g.random_sample())}


@pytest.mark.parametrize("kind", GENERATORS)
def test_keys_determine_the_draws_of_a_generator(kind):
    make, draw = GENERATORS[kind]
    one, other = make(), make()
    draw(other)

    rng.key([one], 1, 2)
    rng.key([other], 1, 2)
    first = draw(one)

    assert draw(other) == first
    rng.key([one], 1, 3)
    assert draw(one) != first


@pytest.mark.parametrize("nest", [
    lambda g: ConcatDataset([Draws(None), Subset(Draws(g), [0, 1])]),
    lambda g: Draws([None, {"flip": SimpleNamespace(deep=(g,))}]),
    lambda g: Draws(functools.partial(max, 1, key=g)),
    lambda g: Draws(collections.deque([Slotted(g)])),
    lambda g: Draws((lambda own: (yield from iter(own.random, None)))(g)),
    lambda g: Draws(lambda: g),
    lambda g: Draws(functools.cache(lambda x=g: x)),
    lambda g: Draws(Draws(g).__len__),
    lambda g: type("Owner", (), {"shared": g})(),
    lambda g: type("Owner", (), {"drawn": property(lambda self: g)})()])
@pytest.mark.parametrize("kind", GENERATORS)
def test_nested_generators_are_found(kind, nest):
    generator = GENERATORS[kind][0]()

    assert [id(found) for found in rng.find_generators(nest(generator))] == [id(generator)]


SHARED = random.Random()


def draw_shared() -> float:
    return SHARED.random()


class Drawing(Draws):
    def __getitem__(self, index: int) -> float:
        return draw_shared()


class DrawingThroughAModule(Draws):
    def __getitem__(self, index: int) -> float:
        return test_generators.draw_shared()


@pytest.mark.parametrize("owner", [Drawing(None), Draws(SHARED.random), Draws(draw_shared),
                                   DrawingThroughAModule(None)])
def test_a_global_generator_is_found_through_the_functions_that_use_it(owner):
    assert rng.find_generators(owner) == [SHARED]


def test_generators_of_one_owner_have_different_keys():
    one, other = random.Random(), random.Random()

    rng.key(rng.find_generators(Draws([one, other])), 1, 2)

    assert one.random() != other.random()


def test_cycles_and_duplicates_are_visited_once():
    owner = Draws(random.Random())
    owner.again, owner.self = owner.generator, owner

    assert rng.find_generators(owner) == [owner.generator]


def test_a_data_set_without_generators_has_none():
    assert rng.find_generators(Draws([1, "a", torch.ones(3), np.ones(3), {"x": None}])) == []
