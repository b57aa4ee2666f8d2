"""What all ranks have to make alike before anything starts: data, and the weights to begin with."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from trainer.agreement import checksums
from trainer.data import batch as batches
from trainer.data.bad import SampleError
from trainer.data.reading import KeyedSamples
from trainer.data.sampler import Slot
from trainer.errors import ConfigError, told_by
from trainer.log import Log
from trainer.prepare import Work, content
from trainer.world import World


def check_data(work: Work, world: World, log: Log, seed: int) -> None:
    """Collective. The trainer shares out the samples itself, so each rank sees all of them.

    Raises:
        ConfigError: ranks have other data, or other numbers of samples, than rank 0.
    """
    everywhere = world.gather_json({**work.card["samples"], "train": work.fingerprint})
    for rank, found in enumerate(everywhere):
        for split, what in found.items():
            if what != everywhere[0][split]:
                raise told_by(0, ConfigError(
                    f'--task: dataset("{split}") is another one on rank {rank} ({what}) than on '
                    f"rank 0 ({everywhere[0][split]}); make the same on each rank, from the seed: "
                    "the trainer shares out the samples itself, so don't cut them by RANK, and "
                    "don't let their order follow a set's or a folder's (sort it)."))
    if what := work.unsteady or _unsteady(work.task, work.data["train"], seed):
        log.announce(f"{what}; a restart differs. Draw from random, numpy.random, torch or a "
                     "generator among the data set's attributes, in one thread")


def _unsteady(task: Any, dataset: Any, seed: int) -> str:
    """What is wrong with a data set that gives other samples when they are read again."""
    if isinstance(dataset, IterableDataset):
        return ""
    reader = KeyedSamples(dataset, seed=seed, collate=getattr(task, "collate", batches.collate))
    slot = Slot(1, 0, 0, True, tuple(range(min(2, len(reader)))))
    try:
        one, other = (content(reader[slot].batch) for _ in "12")
    except SampleError:
        return ""  # who trains on them tells
    return "" if one == other else (
        f"samples {', '.join(map(str, slot.indices))} of the training data are others when they "
        "are read again under the same key: something that they change themselves, or that no "
        "seed keys, decides them")


def check_weights(model: nn.Module, world: World, log: Log) -> None:
    """Collective. Whether model() follows from the seed; ranks are given the weights of rank 0."""
    everywhere = world.gather_json(checksums(model.parameters()).tolist())
    names = [n for (n, _), *sums in zip(model.named_parameters(), *everywhere, strict=True)
             if len(set(sums)) > 1]
    if names:
        log.announce(
            f"ranks have made other weights ({', '.join(names[:5])}{', …' * (len(names) > 5)}) and "
            "take those of rank 0: model() draws from something that the seed doesn't key, so a "
            "start without a checkpoint begins elsewhere; draw from torch's own generators")
