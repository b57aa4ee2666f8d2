"""Find validation samples that are also training samples, by hash, within a time limit."""

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
from trainer.data.map_dataset import KeyedSamples, in_memory
from trainer.data.sampler import MicroBatchSpec

BUDGET_S = 0.3
"""Time limit of the search, in seconds."""
SHARE = 0.01
"""Smallest share of the checked validation samples for which there is a hint."""
_CHUNK = 256


def shared_samples(
    train: Any, validation: Any, *, seed: int, clock: Callable[[], float] = time.monotonic
) -> str:
    """Return the evidence that validation samples are training samples, or "".

    Two `Subset`s of one data set are compared by their indices. Data sets in memory are compared by
    the content of their samples, without augmentation, for as many samples as `BUDGET_S` allows.
    Other data is not compared, since it would have to be fetched twice. No random state changes.
    """
    if any(d is None or isinstance(d, IterableDataset) for d in (train, validation)):
        return ""
    if isinstance(train, Subset) and isinstance(validation, Subset) and (
            train.dataset is validation.dataset):
        trained = {int(i) for i in train.indices}
        shared, checked = sum(int(i) in trained for i in validation.indices), len(validation)
    elif in_memory(train) and in_memory(validation):
        try:
            with rng.preserved():
                shared, checked = _compare(train, validation, seed, clock)
        except (TypeError, RuntimeError):
            return ""  # the training reports a sample that can't be read
    else:
        return ""
    if not checked or shared < max(2, SHARE * checked):
        return ""
    return (f"{shared:,} of {checked:,} validation samples are among the training samples: the "
            "scores are too good")


def _compare(
    train: Any, validation: Any, seed: int, clock: Callable[[], float]
) -> tuple[int, int]:
    """Compare samples by their hashes.

    Returns:
        (number of validation samples found among the training samples, number of validation
        samples checked). (0, 0) if most training samples are equal to another one: then equal
        samples mean nothing.
    """
    started = clock()
    validated = list(_hashes(validation, seed, lambda: clock() - started < BUDGET_S / 3))
    trained = list(_hashes(train, seed, lambda: clock() - started < BUDGET_S))
    distinct = set(trained)
    if 2 * len(distinct) < len(trained):
        return 0, 0
    return sum(h in distinct for h in validated), len(validated)


def _hashes(dataset: Any, seed: int, may_continue: Callable[[], bool]) -> Iterator[int]:
    """Yield the hash of the input of each sample: its first tensor; in a mapping, its largest."""
    samples = KeyedSamples(dataset, seed=seed, augment=False)
    for first in range(0, len(dataset), _CHUNK):
        if not may_continue():
            return
        indices = tuple(range(first, min(first + _CHUNK, len(dataset))))
        batch = samples[MicroBatchSpec(0, 0, 0, True, indices)].batch
        tensors = [t for t in batches.tensors(batch) if t.dim() and len(t) == len(indices)]
        if not tensors:
            return
        named = isinstance(batch, Mapping)
        content: Tensor = max(tensors, key=lambda t: t.numel()) if named else tensors[0]
        rows: np.ndarray = (
            content.reshape(len(indices), -1).contiguous().view(torch.uint8).cpu().numpy())
        for row in rows:
            yield xxhash.xxh3_64_intdigest(row.data)
