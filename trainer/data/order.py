"""Order of the samples of an epoch: a function from places in the epoch to sample indices."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.config.schema import Data
from trainer.errors import ConfigError
from trainer.task import load_object

LONGEST_TABLE = 1 << 24
"""Number of samples up to which `auto` is a permutation in a table: 128 MiB, 1.2 s an epoch."""
ROUNDS = 6
SHIPPED = {name: f"trainer.data.shipped_orders:{kind}" for name, kind in (
    ("weighted", "Weighted"), ("balanced", "Balanced"), ("like-length", "LikeLength"),
    ("mixture", "Mixture"))}
"""Values of `--data.sampler` → the import path."""


class Order:
    """The order of the data set; a subclass has another one."""

    name = "in order"
    facts = ""
    """What it depends on besides the data, such as weights."""
    repeats = False
    """Whether a sample may occur several times in an epoch, with other random draws."""

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The samples at these places of an epoch, both int64 arrays of the same length."""
        return places


class Permutation(Order):
    """A random permutation in a table of 8 bytes a sample."""

    name = "permutation"

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._epoch, self._table = -1, np.empty(0, dtype=np.int64)

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(rng.mix(self._seed, rng.ORDER, epoch))
            self._epoch = epoch
            self._table = torch.randperm(self._samples, generator=generator).numpy()
        return self._table[places]


class KeyedPermutation(Order):
    """A random permutation that is computed where it is needed: it takes neither memory nor time at
    the start of an epoch.

    A balanced Feistel network (Luby and Rackoff 1988) permutes the numbers below the next power of
    four. A result that is no sample is permuted again until it is one, which gives a permutation of
    the samples ("cycle walking", Black and Rogaway 2002). At most 2^62 samples.
    """

    name = "keyed permutation"

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._bits = max(1, ((samples - 1).bit_length() + 1) // 2)  # of one half of a number

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        key = rng.mix(self._seed, rng.ORDER, epoch)
        keys = [rng.mix(number, state=key) for number in range(ROUNDS)]
        found = places.astype(np.uint64)
        walking = np.arange(len(found))
        while len(walking):
            found[walking] = self._permuted(found[walking], keys)
            walking = walking[found[walking] >= self._samples]
        return found.astype(np.int64)

    def _permuted(self, numbers: np.ndarray, keys: list[int]) -> np.ndarray:
        bits, mask = np.uint64(self._bits), np.uint64((1 << self._bits) - 1)
        left, right = numbers >> bits, numbers & mask
        for key in keys:
            left, right = right, left ^ (rng.mix_array(key, right) & mask)
        return (left << bits) | right


class UserOrder(Order):
    """`--data.sampler`: an object of the user or a shipped one, called with (epoch, places)."""

    def __init__(self, path: str, dataset: Any, given: dict[str, Any]) -> None:
        self.name, self._samples = f"--data.sampler {path}", len(dataset)
        make = load_object(SHIPPED.get(path, path), "--data.sampler")
        self._order = make(dataset, **_accepted(make, given)) if callable(make) else make
        if not callable(self._order):
            raise ConfigError(f"{self.name}: {type(self._order).__name__} can't be called with "
                              "(epoch, places); name a class with __call__(self, epoch, places), "
                              "which returns the index of a sample for each place.")
        self.repeats = bool(getattr(self._order, "repeats", False))
        self.facts = str(getattr(self._order, "fingerprint", str)())
        if path not in SHIPPED:
            self._check_function(make(dataset, **_accepted(make, given)))

    def _check_function(self, another: Any) -> None:
        """Refuse an order that depends on earlier calls, or on the other places of a call: a
        resumed run, and each rank, ask a new object, and for other places."""
        places = np.arange(min(len(self), 64))
        half = places[len(places) // 2:]
        here = [self(epoch, places)[half] for epoch in (0, 1) if len(places)]
        self._order, mine = another, self._order
        there = [self(epoch, half) for epoch in (1, 0) if len(places)]
        self._order = mine
        if not np.array_equal(here, there[::-1]):
            raise ConfigError(
                f"{self.name}: a second object returned other samples for the same epoch and "
                "places; make it a function of (seed, epoch, place): draw with "
                "numpy.random.default_rng((seed, epoch)) in each call, for the whole epoch, or "
                "with trainer.rng.")

    def __len__(self) -> int:
        """Number of places in an epoch."""
        return len(self._order) if hasattr(self._order, "__len__") else self._samples

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        found = np.asarray(self._order(epoch, places.copy()))
        if found.shape != places.shape or not np.issubdtype(found.dtype, np.integer) or not (
                found.min() >= 0 and found.max() < self._samples):
            raise ConfigError(
                f"{self.name}: for {len(places)} places it returned "
                f"{found.dtype} of shape {found.shape}; return one sample index from 0 to "
                f"{self._samples - 1} for each place.")
        return found.astype(np.int64)


def _accepted(make: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a class takes."""
    taken = inspect.signature(make).parameters
    return given if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else {
        name: value for name, value in given.items() if name in taken}


def make_order(
    config: Data, dataset: Any, seed: int, *, task: Any = None, micro_size: int = 1
) -> Order:
    """The order in which a run reads its training data; a stream has its own."""
    if isinstance(dataset, IterableDataset):
        for name, value in (("order", config.order), ("sampler", config.sampler)):
            config.check(value in ("auto", None), name, "the training data are a stream, which has "
                         "its own order; remove the flag.", value)
        return Order()
    if config.sampler is not None:
        config.check(config.shuffle == "on" and config.order == "auto", "sampler",
                     "it makes the order: remove --data.order and --data.shuffle.", config.sampler)
        return UserOrder(config.sampler, dataset,
                         {"seed": seed, "task": task, "micro_size": micro_size})
    samples = 0 if dataset is None else len(dataset)
    if config.shuffle == "off":
        return Order()
    if config.order == "keyed" or (config.order == "auto" and samples > LONGEST_TABLE):
        return KeyedPermutation(samples, seed)
    return Permutation(samples, seed)
