"""Orders for `--data.sampler`: weighted, balanced over classes, batches of like length, a mixture.

Each is a function of (seed, epoch, place), so it is the same on any number of ranks and after any
restart. What it needs of the samples comes from a method of the task, called with the training data
set, or from an attribute of that data set; a `Subset` and a `ConcatDataset` pass attributes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from torch.utils.data import ConcatDataset, Subset

from trainer import rng
from trainer.data.map_dataset import Limited
from trainer.data.order import KeyedPermutation
from trainer.errors import ConfigError
from trainer.task import method_of

WINDOW = 64
"""Micro-batches whose samples are sorted by length together: a window of w makes the padded share
of uniform lengths about 1 / w."""


def column(task: Any, dataset: Any, name: str, *others: str) -> Any:
    """The value of each sample: `task.name(dataset)`, or an attribute of the data set of this or
    another name; None if there is none."""
    if own := method_of(task, name):
        if isinstance(dataset, Limited):  # the task knows its own data set
            return np.asarray(own(dataset.dataset))[: len(dataset)]
        return own(dataset)
    for attribute in (name, *others):
        if (found := getattr(dataset, attribute, None)) is not None and not callable(found):
            return found
    if isinstance(dataset, Subset):
        inner = column(None, dataset.dataset, name, *others)
        return None if inner is None else np.asarray(inner)[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [column(None, part, name, *others) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)
    return None


def _values(sampler: str, task: Any, dataset: Any, *names: str, count: int, what: str,
            numbers: bool = True) -> np.ndarray:
    """The `column` of a sampler: `count` values, by default finite numbers of 0 or more."""
    flag, name, found = f"--data.sampler {sampler}", names[0], column(task, dataset, *names)
    remedy = (f"define {name}(dataset) in the task, or an attribute {name} of the training data "
              f"set: {what}")
    if found is None:
        raise ConfigError(f"{flag}: the training data have no {name}; {remedy}.")
    try:
        values = np.asarray(found, dtype=np.float64 if numbers else None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {name} are no numbers ({error}); {remedy}.") from None
    if values.shape != (count,) or (numbers and not (
            np.isfinite(values).all() and (values >= 0).all())):
        kind = "finite numbers of 0 or more" if numbers else "values"
        raise ConfigError(f"{flag}: {name}, of shape {values.shape}, don't fit; return {count} "
                          f"{kind}: {what}.")
    if name == "weights" and not 0 < values.sum() < np.inf:
        raise ConfigError(f"{flag}: the sum of all weights is {values.sum()}; make it positive and "
                          "finite.")
    return values


class Weighted:
    """Draws each place of an epoch on its own, with replacement, with a probability in proportion
    to the sample's `weights`, as torch's `WeightedRandomSampler` does."""

    repeats = True
    _sampler = "weighted"

    def __init__(self, dataset: Any, *, seed: int, task: Any = None) -> None:
        self._seed = seed
        self._bounds = np.cumsum(self._weights(task, dataset))

    def _weights(self, task: Any, dataset: Any) -> np.ndarray:
        return _values("weighted", task, dataset, "weights", count=len(dataset),
                       what="one weight for each sample")

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        draws = rng.mix_array(rng.mix(self._seed, rng.ORDER, epoch), places) >> np.uint64(11)
        # At most 1 - 2^-53, whose product with the total is less than the total: no index is too
        # large, and a sample of weight 0 is never drawn.
        return np.searchsorted(self._bounds, draws * 2.0**-53 * self._bounds[-1], side="right")

    def fingerprint(self) -> str:
        return _digest(self._sampler, self._bounds)


class Balanced(Weighted):
    """Draws with replacement, each class as often as any other. The class of each sample is in
    `labels`, or in the attribute `targets` of torchvision's data sets."""

    _sampler = "balanced"

    def _weights(self, task: Any, dataset: Any) -> np.ndarray:
        labels = _values("balanced", task, dataset, "labels", "targets", count=len(dataset),
                         what="one class for each sample", numbers=False)
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        return 1 / counts[classes]


class LikeLength:
    """Each epoch once over all samples, in micro-batches of like length.

    A random permutation is cut into windows of `WINDOW` micro-batches. In each, the samples are
    sorted by their `lengths`, cut into micro-batches, and these are shuffled.
    """

    def __init__(self, dataset: Any, *, seed: int, micro_size: int, task: Any = None) -> None:
        self._seed, self._micro_size, self._size = seed, micro_size, WINDOW * micro_size
        self._lengths = _values("like-length", task, dataset, "lengths", count=len(dataset),
                                what="the length of each sample")
        self._permutation = KeyedPermutation(len(dataset), seed)
        self._last: tuple[tuple[int, int], np.ndarray] | None = None

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        found, windows = np.empty_like(places), places // self._size
        for window in np.unique(windows).tolist():
            here = windows == window
            found[here] = self._window(epoch, window)[places[here] - window * self._size]
        return found

    def _window(self, epoch: int, number: int) -> np.ndarray:
        """The samples of a window; the last one is kept, since calls follow each other in it."""
        if self._last is None or self._last[0] != (epoch, number):
            first = number * self._size
            places = np.arange(first, min(first + self._size, len(self._lengths)))
            samples = self._permutation(epoch, places)
            samples = samples[np.argsort(self._lengths[samples], kind="stable")]
            count, rest = divmod(len(samples), self._micro_size)
            key = rng.mix(self._seed, rng.ORDER, epoch, number)
            # A micro-batch that isn't full stands at the end of the epoch, but is of any length:
            # otherwise the longest samples would be dropped there each time.
            begin = rng.mix(0, state=key) % (count + 1) * self._micro_size
            short, samples = samples[begin : begin + rest], np.delete(
                samples, slice(begin, begin + rest))
            order = np.argsort(rng.mix_array(key, np.arange(1, count + 1)), kind="stable")
            batches = samples.reshape(count, self._micro_size)[order]
            self._last = (epoch, number), np.concatenate([batches.ravel(), short])
        return self._last[1]

    def fingerprint(self) -> str:
        return _digest("like-length", self._lengths)


class Mixture:
    """A mixture of the data sets in a `ConcatDataset`, in proportion to their `weights`.

    In each epoch, which has as many places as the data set, each part has the same number of
    places, at random. They go through the part in a random order, and through all of it before any
    sample comes again; the next epoch continues there.
    """

    repeats = True

    def __init__(self, dataset: Any, *, seed: int, task: Any = None) -> None:
        if isinstance(dataset, Limited):
            raise ConfigError("--data.limit: --data.sampler mixture needs the whole data sets, and "
                              "the first samples may be of one of them; omit one of the flags.")
        if not isinstance(dataset, ConcatDataset):
            raise ConfigError(f"--data.sampler mixture: the training data are a "
                              f"{type(dataset).__name__}; return a torch.utils.data.ConcatDataset "
                              "of the data sets to mix.")
        self._seed, self._permutation = seed, KeyedPermutation(len(dataset), seed)
        self._sizes = np.diff([0, *dataset.cumulative_sizes])
        weights = _values("mixture", task, dataset, "weights", count=len(self._sizes),
                          what="one weight for each of its data sets")
        self._ends = _shares(weights, len(dataset))
        if (empty := np.flatnonzero((self._sizes == 0) & (weights > 0))).size:
            raise ConfigError(f"--data.sampler mixture: data set {empty[0]} of the ConcatDataset "
                              "is empty; give it the weight 0, or leave it out.")
        self._begins = np.concatenate([[0], self._ends[:-1]])
        self._firsts = np.concatenate([[0], np.cumsum(self._sizes)[:-1]])

    def __call__(self, epoch: int, places: np.ndarray) -> np.ndarray:
        shuffled = self._permutation(epoch, places)
        parts = np.searchsorted(self._ends, shuffled, side="right")
        counts = self._ends - self._begins
        draws = epoch * counts[parts] + shuffled - self._begins[parts]  # since the run's beginning
        passes, found = draws // self._sizes[parts], np.empty_like(places)
        for part, number in np.unique(np.stack([parts, passes]), axis=1).T.tolist():
            here = (parts == part) & (passes == number)
            order = KeyedPermutation(int(self._sizes[part]), rng.mix(self._seed, part))
            found[here] = self._firsts[part] + order(number, draws[here] % self._sizes[part])
        return found

    def fingerprint(self) -> str:
        return _digest("mixture", self._ends)


def _shares(weights: np.ndarray, places: int) -> np.ndarray:
    """Ends of the places of each part, whose numbers are in proportion to the weights, rounded by
    the largest remainder (the first of equal ones)."""
    exact = weights / weights.sum() * places
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: places - int(counts.sum())]
    counts[most] += 1
    return np.cumsum(counts)


def _digest(sampler: str, values: np.ndarray) -> str:
    """Identify what an order depends on besides the data."""
    return f"{sampler} {xxhash.xxh3_64(np.ascontiguousarray(values).data).hexdigest()}"

