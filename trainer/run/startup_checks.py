"""Startup checks: every rank must build the same data and the same initial weights."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from trainer import rng
from trainer.config.schema import Config
from trainer.data.map_dataset import KeyedSamples
from trainer.data.sample_errors import SampleError
from trainer.data.sampler import MicroBatchSpec
from trainer.data.stream_reader import first_samples
from trainer.distributed.partition import block
from trainer.distributed.replica_check import checksums
from trainer.distributed.world import World
from trainer.errors import ConfigError, from_rank, listed
from trainer.run.prepare import Setup, fingerprinted, fingerprints_of, make_data
from trainer.run.proof import content
from trainer.run.stream_proof import DIFFERS, StreamProof, prove_stream, reach, remedies
from trainer.task import uncalled_methods
from trainer.telemetry.events import Log

DRAW = ("a restart gives other bits. Draw from random, numpy.random, torch or a generator among "
        "the data set's attributes, in one thread")
UNORDERED = "other samples in each reading"
"""The fingerprint of data that are not reproducible."""


def check_data(work: Setup, world: World, config: Config[Any]) -> Setup:
    """Collective. Check that all ranks have the same data sets: the trainer shards them itself.
    Lanes without a reproducible order are an exception, because one rank alone reads each of them.
    """
    everywhere = world.gather_json(work.fingerprints)
    for split, what in everywhere[0].items():
        rank, other = next(((rank, found[split]) for rank, found in enumerate(everywhere)
                            if found[split] != what), (0, what))
        if not rank:
            continue
        differs = world.fail_together(partial(is_unordered, work, split, config))
        if not any(world.gather_json(differs)):
            raise from_rank(0, ConfigError(
                f'--task: dataset("{split}") on rank {rank} ({other}) differs from that on rank 0 '
                f"({what}); return the same data on each rank: do not split them by RANK, take "
                "random choices from the seed, and sort the elements of a set or a folder "
                "listing."))
        if split != "train" or not hasattr(work.data[split], "lane"):
            raise from_rank(0, ConfigError(
                f'--task: dataset("{split}") gives other samples in each reading, so the ranks '
                "cannot share it: make its order reproducible (a ParallelMapper of torchdata: "
                "in_order=True) and draw from seeded generators, or use one rank."))
        work = unordered(work, split)
    return work


def is_unordered(work: Setup, split: str, config: Config[Any]) -> bool:
    """Whether a split, made anew, gives other samples than those of its fingerprint."""
    return any(fingerprints_of(work.task, {split: make_data(work.task, config, split)}, config,
                               work.order)[split] != work.fingerprints[split] for _ in range(3))


def unordered(work: Setup, split: str) -> Setup:
    """The setup with a split whose samples are not the same in each reading."""
    return dataclasses.replace(work, fingerprints=work.fingerprints | {split: UNORDERED})


def check_weights(work: Setup, world: World, log: Log) -> list[str]:
    """Collective. Warn of unused methods of the task, and of initial weights that differ between
    ranks (which then use those of rank 0). Returns why the run is only equivalent, if it is."""
    model = work.model
    if unused := uncalled_methods(work.task):
        log.warn_once(unused)
    everywhere = world.gather_json(checksums(model.parameters()).tolist())
    names = [n for (n, _), *sums in zip(model.named_parameters(), *everywhere, strict=True)
             if len(set(sums)) > 1]
    if not names:
        return []
    why = f"initial weights differ between ranks ({listed(names)})"
    log.warn_once(
        f"{why}; those of rank 0 are used. model() uses a random generator that is not seeded, so "
        "another start without a checkpoint gives other weights; draw from torch's default "
        "generators")
    return [why]


def check_sample_reproducibility(work: Setup, log: Log, config: Config[Any]
                                  ) -> tuple[Setup, list[str]]:  # fmt: skip
    """Warn of samples that differ when they are read again under the same key. Returns the setup
    with what was found, and why the run is only equivalent, if it is."""
    reasons = []
    for split, dataset in work.data.items():
        if dataset is None or work.fingerprints[split] == UNORDERED:
            continue
        again = _stream_differs if isinstance(dataset, IterableDataset) else _samples_differ
        why, remedy = again(work, split, config.seed)
        if why:
            if is_unordered(work, split, config):
                work = unordered(work, split)
            reasons.append(why)
            log.warn_once(f"{why}: {remedy}")
    return work, reasons


def _stream_differs(work: Setup, split: str, seed: int) -> tuple[str, str]:
    """How a second iteration over a stream differs, and the remedy; "" if it doesn't."""
    rng.seed_all(seed, rng.DATA)
    fresh = work.task.dataset(split)  # reading may advance the stream used later
    lanes = work.plan.global_size // work.plan.micro_size
    one, other = (list(map(content, first_samples(fresh, lanes=lanes, count=2, seed=seed)))
                  for _ in range(2))
    why = f"a second iteration over the {_adjective(split)} stream gives other samples"
    return why * (one != other), ("each iteration must start from the beginning, and may depend on "
                                  f"the epoch through set_epoch(); {DRAW}")


def _samples_differ(work: Setup, split: str, seed: int) -> tuple[str, str]:
    """How samples differ when they are read again, and the remedy; "" if they don't."""
    reader = KeyedSamples(work.data[split], seed=seed, collate=work.collate,
                          augment=split == "train")
    first = range(min(18, len(reader)))
    # The data set may have kept those that it has read for the fingerprint.
    new = [index for index in first if index not in fingerprinted(len(reader))]
    indices = tuple(dict.fromkeys([*new, *first]))[:2]
    which = f"samples {', '.join(map(str, indices))} of the {_adjective(split)} data"
    read, drawn = [], []
    try:
        for epoch in (0, 1, 0) if split == "train" else (0, 0, 0):
            read.append(content(reader[MicroBatchSpec(1, epoch, 0, True, indices)].batch))
            drawn.append(rng.digest(rng.snapshot()))
    except SampleError:
        return "", ""  # reported when the run reads them
    if read[0] != read[2]:
        return (f"{which} differ when they are read again under the same key", "they depend on "
                "state that reading changes, on an unseeded generator, or set_epoch() continues "
                f"from the previous epoch; {DRAW}")
    why = f"{which} cache the random numbers of their first read" * (drawn[0] != drawn[2])
    return why, ("a restart reads them first in another epoch, so it gives other bits. Cache only "
                 "what is the same each time, and draw each time")


def _adjective(split: str) -> str:
    return "training" if split == "train" else split


def check_streams(
    work: Setup, world: World, log: Log, config: Config[Any]
) -> tuple[Setup, list[str]]:
    """Collective. Refuse states of the training stream that bring back other samples, if it has a
    better way to resume; otherwise warn. Returns the setup with what was found, and why the run is
    only equivalent, if it is."""
    spec, choice = work.stream_spec(config), config.data.stream_resume
    known = DIFFERS if work.fingerprints["train"] == UNORDERED else ""
    if spec is None:
        return work, []
    if config.start_checks == "off" or multiprocessing.current_process().daemon:
        return work, [*[known] * bool(known), "the states of the training stream are not checked"]
    prove = partial(prove_stream, spec, block(spec.lanes, world.rank, world.size),
                    daemon=work.workers > 0)
    with world.long_timeout():
        mine = world.fail_together(prove)
        proofs = [StreamProof(**proof) for proof in world.gather_json(dataclasses.asdict(mine))]
    problem = next((proof.problem for proof in proofs if proof.problem), "")
    unlike = next((proof.unlike for proof in proofs if proof.unlike), known)
    usable = all(proof.usable for proof in proofs)
    if problem and (not usable or (choice == "auto" and not unlike)):
        raise from_rank(0, ConfigError(
            f"--data.stream-resume {choice}: {problem}, so a restart would "
            f"{'not be exact' if usable else 'fail'}. {remedies(usable=usable, unlike=unlike)}"))
    if unlike:
        log.warn_once(f"{'; '.join(filter(None, (problem, unlike)))}; {DRAW}, and keep the order "
                      "of parallel mappers (in_order=True)")
    elif problem:
        log.warn_once(f"{problem}, so a restart is not exact (--data.stream-resume state)")
    if unlike == DIFFERS:
        work = unordered(work, "train")
    return dataclasses.replace(work, card=work.card | {"stream_states": reach(proofs)}), [
        why for why in (problem, unlike) if why]


def recall(work: Setup, then: Mapping[str, Any]) -> Setup:
    """The setup with what the first start has found, from the circumstances of a checkpoint."""
    for split, what in {"train": then.get("data"), **then.get("splits", {})}.items():
        if what == UNORDERED and split in work.fingerprints:
            work = unordered(work, split)
    return dataclasses.replace(
        work, card=work.card | {"stream_states": then.get("stream_states", "")})
