"""Startup checks: every rank must build the same data and the same initial weights."""

from __future__ import annotations

import dataclasses
import multiprocessing
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
from trainer.run.prepare import Setup, content
from trainer.run.stream_proof import StreamProof, prove_stream
from trainer.task import uncalled_methods
from trainer.telemetry.events import Log

DRAW = ("a restart gives other bits. Draw from random, numpy.random, torch or a generator among "
        "the data set's attributes, in one thread")


def check_data(work: Setup, world: World) -> None:
    """Collective. Check that all ranks have the same data sets: the trainer shards them itself."""
    everywhere = world.gather_json(work.fingerprints)
    for rank, found in enumerate(everywhere):
        for split, what in found.items():
            if what != everywhere[0][split]:
                raise from_rank(0, ConfigError(
                    f'--task: dataset("{split}") on rank {rank} ({what}) differs from that on '
                    f"rank 0 ({everywhere[0][split]}); return the same data on each rank: do not "
                    "split them by RANK, take random choices from the seed, and sort the elements "
                    "of a set or a folder listing."))


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


def check_sample_reproducibility(work: Setup, log: Log, seed: int) -> list[str]:
    """Warn of samples that differ when they are read again under the same key. Returns why the run
    is only equivalent, if it is."""
    reasons = []
    for split, dataset in work.data.items():
        if dataset is None:
            continue
        again = _stream_differs if isinstance(dataset, IterableDataset) else _samples_differ
        why, remedy = again(work, split, seed)
        if why:
            reasons.append(why)
            log.warn_once(f"{why}: {remedy}")
    return reasons


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
    indices = tuple(range(min(2, len(reader))))
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


def check_stream(work: Setup, world: World, log: Log, config: Config[Any]) -> list[str]:
    """Collective. Refuse states of the training stream that bring back other samples, if its order
    is reproducible; otherwise warn. Returns why the run is only equivalent, if it is."""
    spec, choice = work.stream_spec(config), config.data.stream_resume
    if spec is None:
        return []
    if config.start_checks == "off" or multiprocessing.current_process().daemon:
        return ["the states of the training stream are not checked"]
    prove = partial(prove_stream, spec, block(spec.lanes, world.rank, world.size),
                    daemon=work.workers > 0)
    with world.long_timeout():
        mine = world.fail_together(prove)
        proofs = [StreamProof(**proof) for proof in world.gather_json(dataclasses.asdict(mine))]
    problem = next((proof.problem for proof in proofs if proof.problem), "")
    reproducible = all(proof.reproducible for proof in proofs)
    if problem and reproducible and choice == "auto":
        raise from_rank(0, ConfigError(
            f"--data.stream-resume auto: {problem}, so a restart would not be exact. Make "
            "load_state_dict() restore the exact position, buffers included; or use "
            "--data.stream-resume read-through (a restart reads the samples of its epoch up to its "
            "position once more: exact), or state (equivalent), if it can be saved and loaded."))
    why = [problem] if problem else []
    if not reproducible:
        why.append("another reading of the training stream from its start gives other samples")
        log.warn_once(f"{'; '.join(why)}; {DRAW}")
    elif problem:
        log.warn_once(f"{problem}, so a restart is not exact (--data.stream-resume state)")
    return why
