"""Samples that are trained on and validated with: looked for once, by hash, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from trainer import rng
from trainer.data import batch as batches
from trainer.data.reading import KeyedSamples, in_memory
from trainer.data.sampler import Slot

BUDGET_S = 0.3
"""Seconds that the look may take."""
SHARE = 0.01
"""Of the validation samples that were looked at: so many equal ones are worth a hint."""
_CHUNK = 256


def shared_samples(
    train: Any, validation: Any, *, seed: int, clock: Callable[[], float] = time.monotonic
) -> str:
    """The evidence that validation samples are trained on; "" where none is found.

    Two `Subset`s of one data set are compared by their indices. Otherwise the samples of data sets
    in memory are, as they are without augmentation, as many as `BUDGET_S` allows; data that have
    to be fetched aren't read twice. No generator moves.
    """
    if any(d is None or isinstance(d, IterableDataset) for d in (train, validation)):
        return ""
    if isinstance(train, Subset) and isinstance(validation, Subset) and (
            train.dataset is validation.dataset):
        mine = {int(i) for i in train.indices}
        found, looked = sum(int(i) in mine for i in validation.indices), len(validation)
    elif in_memory(train) and in_memory(validation):
        try:
            with rng.preserved():
                found, looked = _equal(train, validation, seed, clock)
        except (TypeError, RuntimeError):
            return ""  # a sample that can't be read is told of where it is used
    else:
        return ""
    if not looked or found < max(2, SHARE * looked):
        return ""
    return (f"{found:,} of {looked:,} validation samples are among the training samples: the "
            "scores are too good")


def _equal(
    train: Any, validation: Any, seed: int, clock: Callable[[], float]
) -> tuple[int, int]:
    """(how many validation samples were found among the training samples, how many were looked
    for). Data of which most samples are equal to others tell nothing."""
    begun = clock()
    wanted = list(_hashes(validation, seed, lambda: clock() - begun < BUDGET_S / 3))
    kept = list(_hashes(train, seed, lambda: clock() - begun < BUDGET_S))
    known = set(kept)
    if 2 * len(known) < len(kept):
        return 0, 0
    return sum(h in known for h in wanted), len(wanted)


def _hashes(dataset: Any, seed: int, go_on: Callable[[], bool]) -> Iterator[int]:
    """Of each sample's input: its first tensor, or, where they have names, its largest."""
    samples = KeyedSamples(dataset, seed=seed, augment=False)
    for first in range(0, len(dataset), _CHUNK):
        if not go_on():
            return
        indices = tuple(range(first, min(first + _CHUNK, len(dataset))))
        batch = samples[Slot(0, 0, 0, True, indices)].batch
        tensors = [t for t in batches.tensors(batch) if t.dim() and len(t) == len(indices)]
        if not tensors:
            return
        named = isinstance(batch, Mapping)
        content: Tensor = max(tensors, key=lambda t: t.numel()) if named else tensors[0]
        rows: np.ndarray = (
            content.reshape(len(indices), -1).contiguous().view(torch.uint8).cpu().numpy())
        for row in rows:
            yield xxhash.xxh3_64_intdigest(row.data)
