"""What all ranks have to make alike before anything starts: data, and the weights to begin with."""

from __future__ import annotations

from torch.utils.data import IterableDataset

from trainer import rng
from trainer.agreement import checksums
from trainer.data import batch as batches
from trainer.data.bad import SampleError
from trainer.data.feed import first_samples
from trainer.data.reading import KeyedSamples
from trainer.data.sampler import Slot
from trainer.errors import ConfigError, told_by
from trainer.log import Log
from trainer.prepare import Work, content
from trainer.task import uncalled
from trainer.world import World


def check_data(work: Work, world: World) -> None:
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


def check_weights(work: Work, world: World, log: Log) -> None:
    """Collective. Whether model() follows from the seed (ranks are given the weights of rank 0),
    whether all of it that can be trained will be, and the task's methods called."""
    model = work.model
    if unused := uncalled(work.task):
        log.announce(unused)
    taken = {p for group in work.optimizer.param_groups for p in group["params"]}
    left = [n for n, p in model.named_parameters() if p.requires_grad and p not in taken]
    if left:
        log.announce(f"{', '.join(left[:5])}{', …' * (len(left) > 5)} can be trained, and "
                     "parameter_groups() leaves it out, so it stays as it is; freeze what isn't to "
                     "be learnt (requires_grad_(False))")
    everywhere = world.gather_json(checksums(model.parameters()).tolist())
    names = [n for (n, _), *sums in zip(model.named_parameters(), *everywhere, strict=True)
             if len(set(sums)) > 1]
    if names:
        log.announce(
            f"ranks have made other weights ({', '.join(names[:5])}{', …' * (len(names) > 5)}) and "
            "take those of rank 0: model() draws from something that the seed doesn't key, so a "
            "start without a checkpoint begins elsewhere; draw from torch's own generators")


def check_reading(work: Work, log: Log, seed: int) -> None:
    """Whether training samples are the same when they are read again under the same key."""
    dataset = work.data["train"]
    if isinstance(dataset, IterableDataset):
        rng.key_generators(seed, rng.DATA)
        fresh = work.task.dataset("train")  # reading may move a stream that is to be trained on
        one, other = ([content(sample) for sample in first_samples(
            fresh, lanes=work.plan.global_size // work.plan.micro_size, count=2, seed=seed)]
            for _ in "12")
        why = ("the training stream gives other samples when it is iterated over anew: it has to "
               "start anew, and what changes with the epoch comes by set_epoch()")
    else:
        reader = KeyedSamples(dataset, seed=seed, collate=getattr(
            work.task, "collate", batches.collate))
        indices = tuple(range(min(2, len(reader))))
        names, read, drawn = ", ".join(map(str, indices)), [], []
        try:
            for epoch in (0, 1, 0):
                read.append([content(reader[Slot(1, epoch, 0, True, indices)].batch)])
                drawn.append(rng.digest(rng.snapshot()))
        except SampleError:
            return  # who trains on them tells
        one, _, other = read
        why = (f"samples {names} of the training data are others when they are read again under "
               "the same key: something that they change themselves, or that no seed keys, "
               "decides them, or set_epoch() goes on from the epoch before")
        if one == other and drawn[0] != drawn[2]:
            log.announce(f"samples {names} of the training data keep what they draw when they are "
                         "read first; a restart, which reads them first in another epoch, "
                         "differs. Keep what is the same each time, and draw each time")
    if one != other:
        log.announce(f"{why}; a restart differs. Draw from random, numpy.random, torch or a "
                     "generator among the data set's attributes, in one thread")
