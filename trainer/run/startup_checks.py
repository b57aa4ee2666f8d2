"""Startup checks: every rank must build the same data and the same initial weights."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from trainer import rng
from trainer.data.map_dataset import KeyedSamples
from trainer.data.sample_errors import SampleError
from trainer.data.sampler import MicroBatchSpec
from trainer.data.stream_reader import first_samples
from trainer.distributed.replica_check import checksums
from trainer.distributed.world import World
from trainer.errors import ConfigError, from_rank, listed
from trainer.run.prepare import Setup, content
from trainer.task import uncalled_methods
from trainer.telemetry.events import Log


def check_data(work: Setup, world: World) -> None:
    """Collective. Check that all ranks have the same data sets: the trainer shards them itself."""
    everywhere = world.gather_json({**work.card["samples"], "train": work.fingerprint})
    for rank, found in enumerate(everywhere):
        for split, what in found.items():
            if what != everywhere[0][split]:
                raise from_rank(0, ConfigError(
                    f'--task: dataset("{split}") on rank {rank} ({what}) differs from that on '
                    f"rank 0 ({everywhere[0][split]}); return the same data on each rank: do not "
                    "split them by RANK, take random choices from the seed, and sort the elements "
                    "of a set or a folder listing."))


def check_weights(work: Setup, world: World, log: Log) -> None:
    """Collective. Warn of unused methods of the task, and of initial weights that differ between
    ranks (which then use those of rank 0)."""
    model = work.model
    if unused := uncalled_methods(work.task):
        log.warn_once(unused)
    everywhere = world.gather_json(checksums(model.parameters()).tolist())
    names = [n for (n, _), *sums in zip(model.named_parameters(), *everywhere, strict=True)
             if len(set(sums)) > 1]
    if names:
        log.warn_once(
            f"initial weights differ between ranks ({listed(names)}); those of rank 0 are used. "
            "model() uses a random generator that is not seeded, so another start without a "
            "checkpoint gives other weights; draw from torch's default generators")


def check_sample_reproducibility(work: Setup, log: Log, seed: int) -> None:
    """Warn if training samples differ when they are read again under the same key."""
    dataset = work.data["train"]
    if isinstance(dataset, IterableDataset):
        rng.seed_all(seed, rng.DATA)
        fresh = work.task.dataset("train")  # reading may advance the stream used for training
        lanes = work.plan.global_size // work.plan.micro_size
        one, other = (list(map(content, first_samples(fresh, lanes=lanes, count=2, seed=seed)))
                      for _ in range(2))
        why = ("a second iteration over the training stream gives other samples: each iteration "
               "must start from the beginning, and may depend on the epoch through set_epoch()")
    else:
        reader = KeyedSamples(dataset, seed=seed, collate=work.collate)
        indices = tuple(range(min(2, len(reader))))
        names, read, drawn = ", ".join(map(str, indices)), [], []
        try:
            for epoch in (0, 1, 0):
                read.append([content(reader[MicroBatchSpec(1, epoch, 0, True, indices)].batch)])
                drawn.append(rng.digest(rng.snapshot()))
        except SampleError:
            return  # reported when training reads them
        one, _, other = read
        why = (f"samples {names} of the training data differ when they are read again under the "
               "same key: they depend on state that reading changes, on an unseeded generator, or "
               "set_epoch() continues from the previous epoch")
        if one == other and drawn[0] != drawn[2]:
            log.warn_once(f"samples {names} of the training data cache the random numbers of their "
                         "first read; a restart reads them first in another epoch, so it gives "
                         "other bits. Cache only what is the same each time, and draw each time")
    if one != other:
        log.warn_once(f"{why}; a restart gives other bits. Draw from random, numpy.random, torch "
                     "or a generator among the data set's attributes, in one thread")
