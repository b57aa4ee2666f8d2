"""What is opened at a place of the run, at the start and after a rollback: data and record."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer import card, folder, graph, resume, rng
from trainer.config import Config
from trainer.console import Console
from trainer.data import batch as batches
from trainer.data.batch import to_device
from trainer.data.feed import Cut
from trainer.data.lanes import StreamSpec
from trainer.data.loader import SampledSource, Source
from trainer.data.reading import KeyedSamples
from trainer.data.sampler import MicroBatchSampler, Slot
from trainer.data.stream import Stream
from trainer.device import device_mb, share_of_cores
from trainer.diagnosis import near
from trainer.folder import TIMING, Identity
from trainer.hints import Facts, Hints, judge_batchnorm, judge_sizes
from trainer.level import Lines
from trainer.log import Log, read_events
from trainer.metrics import Metrics, Sink, order_of
from trainer.prepare import REMEDY, Work
from trainer.sinks import Own, TensorBoard, grid
from trainer.source import Found
from trainer.state import TrainState
from trainer.timing import Timing, resident_mb
from trainer.wandb_sink import WandB
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
            StreamSpec(dataset=data, seed=config.seed, collate=collate,
                       layout=Cut.of(data, lanes=batch.micro_batches, micro_size=batch.micro_size)),
            rank=world.rank, num_ranks=world.size,
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
    metrics: Metrics, path: Path, log: Log, lines: Lines, world: World, work: Work, position: int,
    config: Config[Any], *, run_id: str, guard: Callable[[], AbstractContextManager[None]],
    about: Sequence[str] = (), leak: str = "",
) -> None:
    """metrics.jsonl, cut to the step that is resumed and completed, and the sinks.

    Args:
        guard: around a change of the folder; raises where it belongs to a newer attempt.
        about: the run's card.
        leak: the evidence that validation samples are trained on, if there is any.
    """
    kept, lacking = lines
    elsewhere = config.resume not in ("auto", "never")
    _tell_gaps(path / folder.METRICS, kept, position, log, elsewhere=elsewhere)
    total, every = work.intervals.total, work.intervals.log or work.intervals.total
    first = min((line["step"] for line in lacking), default=position + 1)
    if position >= total:  # the final figures are shown again
        first = min(first, position)
        lacking = [line for line in kept if line["step"] >= first]
    names = getattr(work.task, "class_names", ())
    lengths = {"epoch": work.plan.steps_per_epoch, "total": total}
    scalars_every = config.log.tensorboard_every.steps(**lengths) or total
    board = TensorBoard(
        path / folder.TENSORBOARD, every=scalars_every, first=first if position else 0,
        images=preview(work.task, log) if position == 0 else None, card=about,
        restarts=log.attempt, class_names=names, norms=_norms_before(kept, first),
        histograms=config.log.histograms.steps(**lengths), tensors=partial(_tensors, work.model),
    )  # fmt: skip
    sinks: list[Sink] = [board]
    if world.is_main:
        bar = sys.stderr.isatty() and config.log.level in ("debug", "info")
        sinks += [Console(log, total=total, every=every, start=position, bar=bar,
                          restarts=log.attempt)]
        if config.log.wandb != "off":
            sinks.append(WandB(path, run_id, log, mode=config.log.wandb, every=scalars_every,
                               settings=resume.settings(config), class_names=names))
        sinks.append(_hints(config, work, world, log, path, kept, leak))
        if config.log.graph == "on" and not position:
            _show_graph(board, config, work, world, log)
        sinks += [Own(name, make, path, log) for name, make in work.sinks.items()]
    metrics.open(path / folder.METRICS, sinks, kept=kept, lacking=lacking, guard=guard,
                 tell=log.warning)


def open_timing(path: Path, identity: Identity, world: World, log: Log, workers: int) -> Timing:
    """The record of where the time goes; rank 0 writes it, the others tell theirs."""
    on_cuda = world.device.type == "cuda"
    timing = Timing(rank=world.rank, size=world.size, attempt=identity.attempt, workers=workers,
                    cores=share_of_cores(world.local_size), tell=log.warning,
                    memory=partial(device_mb, world.device) if on_cuda else resident_mb)
    if world.is_main:
        timing.open(path / TIMING)
    return timing


def _tell_gaps(
    path: Path, kept: Sequence[dict[str, Any]], position: int, log: Log, *, elsewhere: bool
) -> None:  # fmt: skip
    """Say which steps' lines the record has lost, if any: they aren't made again.

    Args:
        elsewhere: the run may have begun at a step of another one, whose record isn't its own.
    """
    there = {line["step"] for line in kept if not order_of(line)[1]}
    begin = min(there, default=position + 1) if elsewhere else 1
    if lost := [step for step in range(begin, position + 1) if step not in there]:
        log.warning(f"{near(path)}: the lines of {len(lost)} of {position} steps are gone (the "
                    f"first is step {lost[0]}, the last {lost[-1]}), and no checkpoint holds them; "
                    "compare will find that. The training itself goes on exactly. A copy of the "
                    "file, put there before a start, mends it")
        log.event("lines-lost", first=lost[0], last=lost[-1], count=len(lost))


def _norms_before(kept: Sequence[dict[str, Any]], first: int) -> list[float]:
    """Gradient norms of the steps that were shown before `first`, since the last validation."""
    norms: list[float] = []
    for line in kept:
        if line["step"] >= first:
            break
        if "val_loss" in line:
            norms.clear()
        elif line["grad_norm"] is not None:
            norms.append(line["grad_norm"])
    return norms


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each parameter, and each gradient as it was applied last, on the host."""
    for name, parameter in model.named_parameters():
        yield f"parameters/{name}", parameter.detach().float().cpu().numpy()
        if parameter.grad is not None:
            yield f"gradients/{name}", parameter.grad.to_dense().float().cpu().numpy()


def _hints(
    config: Config[Any], work: Work, world: World, log: Log, path: Path,
    kept: Sequence[dict[str, Any]], leak: str,
) -> Hints:  # fmt: skip
    """The hints, of which those about what the run consists of are given at once."""
    said = [e["hint"] for e in read_events(path / folder.EVENTS) if e.get("event") == "hint"]
    expected = work.task.first_loss() if hasattr(work.task, "first_loss") else None
    facts = Facts(
        total=work.intervals.total, epoch=work.plan.steps_per_epoch,
        clip_norm=0.0 if config.clip.value else config.clip.norm,
        micro_size=config.batch.micro_size, per_rank=config.batch.global_size // world.size,
        expected_loss=0.0 if config.init is not None else expected,
        zero_gradients=partial(_zero_gradients, work.model), memory=partial(_memory, world.device),
    )  # fmt: skip
    hints = Hints(log, facts, off=config.log.hints_off, said=said, lines=kept)
    hints.give("small-batchnorm", judge_batchnorm(
        card.batchnorm_samples(config, world.size, work.card)))
    if world.device.type == "cuda":
        hints.give("odd-sizes", judge_sizes(_widths(work.model), config.batch.micro_size))
    hints.give("shared-samples", leak)
    return hints


def _zero_gradients(model: nn.Module) -> list[str]:
    """Parameters whose gradient is exactly zero. Waits for the device."""
    found = [(n, p.grad) for n, p in model.named_parameters()
             if p.grad is not None and p.grad.numel()]
    if not found:
        return []
    largest = torch._foreach_norm([g for _, g in found], math.inf)
    values = torch.stack([value.float() for value in largest]).tolist()
    return [name for (name, _), value in zip(found, values, strict=True) if value == 0]


def _memory(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device),
            torch.cuda.get_device_properties(device).total_memory)


def _widths(model: nn.Module) -> Iterator[tuple[str, int]]:
    """What a layer gives, and how many words an embedding has."""
    for name, module in model.named_modules():
        for attribute in ("out_features", "out_channels", "num_embeddings"):
            if isinstance(width := getattr(module, attribute, None), int):
                yield name, width


def _show_graph(
    board: TensorBoard, config: Config[Any], work: Work, world: World, log: Log
) -> None:
    """A picture that fails costs a warning and not the run."""
    try:
        data = work.data["train"]
        if isinstance(data, IterableDataset):
            raise RuntimeError("the training data are a stream, which isn't read for this")
        collate = getattr(work.task, "collate", batches.collate)
        samples = KeyedSamples(data, seed=config.seed, collate=collate, augment=False)
        with rng.preserved():
            batch = samples[Slot(0, 0, 0, True, (0, min(1, len(data) - 1)))].batch
        board.graph(graph.trace(work.model, work.task.loss, to_device(batch, world.device)))
    except Exception as error:
        log.warning(f"no graph of the model: {type(error).__name__}: {error}")


def preview(task: Any, log: Log) -> Any:
    """Some of the task's samples as one image; one that fails costs a warning and not the run."""
    try:
        return grid(task.preview(32)) if hasattr(task, "preview") else None
    except Exception as error:
        log.warning(f"no picture of samples: the task's preview(32), uint8 N×C×H×W: "
                    f"{type(error).__name__}: {error}")
        return None
