"""Check that a data set returns the same samples when it is read again, as after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from trainer import generators, rng
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, begin_epoch
from trainer.data.sampler import Slot
from trainer.run.attributes import same
from trainer.task import SPLITS

SEED = 0


def check_items(task: Any, batch_size: int) -> Iterator[str]:
    """Yield the problems of a task's samples, one sentence each."""
    for split in SPLITS:
        try:
            dataset, again = (dataset_of(task, split) for _ in range(2))
            if dataset is None or (hasattr(dataset, "__len__") and not len(dataset)):
                if split == "train":
                    yield ('dataset("train") has no samples: it must have some; only "validation" '
                           'and "test" may be None.')
                continue
            first = read(task, dataset, 0, batch_size)
            later = read(task, dataset, 0, batch_size, epoch=1)  # another epoch, as in a run
            second = read(task, dataset, 0, batch_size)
            fresh = [read(task, again, 0, batch_size, epoch=epoch) for epoch in (1, 0)]
        except Exception as error:
            yield raised(f'reading dataset("{split}")', error)
            continue
        if not any(True for _ in batches.tensors(first)):
            yield f'dataset("{split}") returns batches without tensors.'
        elif not same(first, second) and isinstance(dataset, IterableDataset):
            yield (f'the stream dataset("{split}") returns different samples in a second '
                   "iteration: start each iter() from the beginning, keep the position in the "
                   "iterator (which may have a state_dict) and not in the data set, and draw from "
                   "random, numpy.random, torch or a generator that is an attribute of it.")
        elif not same(first, second):
            yield (f'samples of dataset("{split}") differ when they are read again under the same '
                   "key: draw from random, numpy.random, torch, a generator that is an attribute "
                   "of the data set, or `indices.keys`; and don't count reads.")
        elif not same([later, first], fresh):
            yield (f'samples of dataset("{split}") differ between two data sets created one after '
                   "the other and read in different order: a restarted run would train on other "
                   "data.")


def dataset_of(task: Any, split: str) -> Any:
    """A split's data set, created as in a run."""
    rng.key_generators(SEED, rng.DATA)
    return task.dataset(split)


def read(task: Any, dataset: Any, first: int, count: int, *, epoch: int = 0) -> Any:
    """Read a batch of `count` samples from `first` on (fewer at the end), as the loader does."""
    collate = getattr(task, "collate", batches.collate)
    if isinstance(dataset, IterableDataset):
        begin_epoch(dataset, epoch, seed=SEED)
        rng.key_generators(SEED, rng.SAMPLE, epoch)
        generators.key(generators.kept_by(dataset), SEED, rng.SAMPLE, epoch)
        items = [item for item, _ in zip(dataset, range(first + count), strict=False)][first:]
        return collate(items)
    indices = tuple(range(first, min(first + count, len(dataset))))
    return KeyedSamples(dataset, seed=SEED, collate=collate)[
        Slot(1, epoch, 0, True, indices)].batch


def raised(doing: str, error: Exception) -> str:
    """An operation and the exception it raised, in one line."""
    text = str(error).strip().splitlines()
    return f"{doing} raised {type(error).__name__}: {text[0] if text else 'without a message'}"
