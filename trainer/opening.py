"""What is opened at a place of the run, at the start and after a rollback: data and record."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from trainer import folder
from trainer.config import Config
from trainer.data import batch as batches
from trainer.data.feed import Cut
from trainer.data.loader import SampledSource, Source
from trainer.data.reading import KeyedSamples
from trainer.data.sampler import MicroBatchSampler
from trainer.data.stream import Stream
from trainer.device import device_mb, share_of_cores
from trainer.folder import TIMING, Identity
from trainer.level import Lines
from trainer.log import Log
from trainer.metrics import Metrics, Sink
from trainer.prepare import REMEDY, Work
from trainer.sinks import Console, Own, TensorBoard
from trainer.source import Found
from trainer.state import TrainState
from trainer.timing import Timing, resident_mb
from trainer.world import World


def open_source(
    config: Config[Any], work: Work, world: World, state: TrainState, workers: int,
    found: Found | None,
) -> Source:
    """Where the micro-batches come from, at the place of `state.progress`: a map-style data set,
    or a stream, which is a part of the state and begins where the checkpoint says.
    """
    progress = state.progress
    data = work.data["train"]
    collate = getattr(work.task, "collate", batches.collate)
    if isinstance(data, IterableDataset):
        batch = config.batch
        stream = Stream(
            data, Cut.of(data, lanes=batch.micro_batches, micro_size=batch.micro_size),
            seed=config.seed, collate=collate, rank=world.rank, num_ranks=world.size,
            workers=workers, prefetch=config.data.prefetch, device=world.device,
            step=lambda: progress.step, gather=world.gather_json,
        )  # fmt: skip
        state.parts["stream"] = stream
        if found is not None and "stream" in found.facts["parts"]:
            stream.load_state_dict(found.facts["parts"]["stream"])
        return stream
    sampler = MicroBatchSampler(
        work.plan, rank=world.rank, num_ranks=world.size, seed=config.seed,
        shuffle=config.data.shuffle == "on", position=progress.step,
        total_steps=work.intervals.total,
    )  # fmt: skip
    samples = KeyedSamples(
        data, seed=config.seed, collate=collate, skip=config.data.on_error == "skip",
        rank=world.rank, advice=REMEDY,
    )  # fmt: skip
    return SampledSource(samples, sampler, workers=workers, prefetch=config.data.prefetch,
                         device=world.device)


def open_metrics(
    metrics: Metrics, path: Path, log: Log, lines: Lines, world: World, work: Work, position: int
) -> None:
    """metrics.jsonl, cut to the step that is resumed and completed, and the sinks."""
    kept, lacking = lines
    total, every = work.intervals.total, work.intervals.log or work.intervals.total
    first = min((line["step"] for line in lacking), default=position + 1)
    if position >= total:  # the final figures are shown again
        first = min(first, position)
        lacking = [line for line in kept if line["step"] >= first]
    sinks: list[Sink] = [
        TensorBoard(path / folder.TENSORBOARD, every=every, purge_step=first if position else 0,
                    images=_preview(work.task, position)),
    ]  # fmt: skip
    if world.is_main:
        sinks.append(Console(log, total=total, every=every, start=position,
                             bar=sys.stderr.isatty()))
        sinks += [Own(name, make, path, log) for name, make in work.sinks.items()]
    metrics.open(path / folder.METRICS, sinks, kept=kept, lacking=lacking)


def open_timing(path: Path, identity: Identity, world: World, log: Log, workers: int) -> Timing:
    """The record of where the time goes; rank 0 writes it, the others tell theirs."""
    on_cuda = world.device.type == "cuda"
    timing = Timing(rank=world.rank, size=world.size, attempt=identity.attempt, workers=workers,
                    cores=share_of_cores(world.local_size), tell=log.warning,
                    memory=partial(device_mb, world.device) if on_cuda else resident_mb)
    if world.is_main:
        timing.open(path / TIMING)
    return timing


def _preview(task: Any, position: int) -> Any:
    return task.preview(32) if position == 0 and hasattr(task, "preview") else None
