"""Open the data source and the record of a run, at the start and after a rollback."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.replication import resume_record
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.train_state import TrainState
from trainer.config import compatibility
from trainer.data import batch as batches
from trainer.data.batch import to_device
from trainer.data.loader import MicroBatchSource
from trainer.data.map_dataset import KeyedSamples, shared_samples
from trainer.data.sampler import MicroBatchSampler, MicroBatchSpec
from trainer.data.stream import StreamReader
from trainer.data.stream_reader import StreamSpec
from trainer.data.workers import DataReader
from trainer.distributed import torch_private
from trainer.distributed.device import device_mb, share_of_cores
from trainer.distributed.world import World
from trainer.run import startup_summary
from trainer.run.context import Context, RunFolder
from trainer.run.prepare import REMEDY, Setup, loader_workers
from trainer.run.run import Run
from trainer.run.run_dir import RunIdentity
from trainer.storage import layout
from trainer.storage.files import display_path
from trainer.storage.jsonl import last_records, sample_records
from trainer.telemetry.console import Console
from trainer.telemetry.events import Log
from trainer.telemetry.hints import HintFacts, Hints, check_batchnorm, check_sizes
from trainer.telemetry.metrics import Metrics, Sink, line_key
from trainer.telemetry.step_timing import StepTiming, resident_mb
from trainer.telemetry.tensorboard import NORMS, GuardedSink, TensorBoard
from trainer.telemetry.wandb import WandB


def open_source(
    context: Context, setup: Setup, state: TrainState, found: CheckpointRef | None
) -> MicroBatchSource:
    """Open the source of the micro-batches at the position of `state.progress`. A stream becomes a
    part of the state, and begins at its position in the checkpoint `found`."""
    config, world, data = context.config, context.world, setup.data["train"]
    collate = getattr(setup.task, "collate", batches.collate)
    workers = loader_workers(config, data, world)
    if isinstance(data, IterableDataset):
        batch = config.batch
        stream = StreamReader(
            StreamSpec(dataset=data, seed=config.seed, collate=collate,
                       lanes=batch.micro_batches, micro_size=batch.micro_size),
            rank=world.rank, num_ranks=world.size, workers=workers, prefetch=config.data.prefetch,
            device=world.device, step=lambda: state.progress.step, gather=world.gather_json)
        state.parts["stream"] = stream
        if found is not None and "stream" in found.state.parts:
            stream.load_state_dict(found.state.parts["stream"])
        return stream
    sampler = MicroBatchSampler(
        setup.plan, rank=world.rank, num_ranks=world.size, seed=config.seed,
        shuffle=config.data.shuffle == "on", position=state.progress.step,
        total_steps=setup.intervals.total)
    samples = KeyedSamples(data, seed=config.seed, collate=collate, rank=world.rank,
                           skip=config.data.on_error == "skip", advice=REMEDY)
    return DataReader(samples, sampler=sampler, workers=workers,
                      prefetch=config.data.prefetch, device=world.device)


def reopen(run: Run, found: CheckpointRef) -> None:
    """Collective. Read and record the run from the position of a checkpoint, for a roll-back."""
    run.state.progress.restore(found.state.progress)
    run.loader.reopen(partial(open_source, run.context, run.setup, run.state, found))
    open_metrics(run.record.metrics, run.context, run.setup, run.folder, found)


def open_metrics(
    metrics: Metrics, context: Context, setup: Setup, folder: RunFolder,
    found: CheckpointRef | None, *, summary: Sequence[str] = (),
) -> None:  # fmt: skip
    """Collective. Open metrics.jsonl, cut to the step that is resumed, and the sinks; `summary` are
    the lines of the startup summary."""
    config, file, log = context.config, context.path / layout.METRICS, context.log
    metrics.close()
    record, end = resume_record(found, file, context.world)
    metrics.continue_at(end)
    if not context.world.writes_run_dir:
        return
    position = 0 if found is None else found.step
    if not record.begin.offset:
        _report_gaps(file, record.kept, position, log,
                     from_other_run=config.resume not in ("auto", "never"))
    metrics.open(file, record, guard=folder.lock.committing, warn=log.warning)
    history, unshown = last_records(file, NORMS), record.unshown
    total, every = setup.intervals.total, setup.intervals.log or setup.intervals.total
    first = min((line["step"] for line in unshown), default=position + 1)
    if position >= total:  # the final metrics are shown again
        first = min(first, position)
        unshown = [line for line in history if line["step"] >= first]
    names = getattr(setup.task, "class_names", ())
    scalars_every = setup.steps(config.log.tensorboard_every) or total
    board = TensorBoard(
        context.path / layout.TENSORBOARD, every=scalars_every, first=first if position else 0,
        class_names=names, norms=_norms_before(history, first),
        histograms_every=setup.steps(config.log.histograms),
        tensors=partial(_tensors, setup.model))
    board.introduce(summary, log.attempt)
    if not position:
        show_samples(board, setup.task, log)
    sinks: list[Sink] = [board]
    if context.world.is_main:
        bar = sys.stderr.isatty() and config.log.level in ("debug", "info")
        sinks.append(Console(log, total=total, every=every, start=position, bar=bar,
                             restarts=log.attempt))
        if config.log.wandb != "off":
            make_wandb = partial(
                WandB, context.path, folder.identity.run, mode=config.log.wandb,
                every=scalars_every, settings=compatibility.settings(config), class_names=names)
            sinks.append(GuardedSink(f"--log.wandb {config.log.wandb}", make_wandb, log))
        if "all" not in config.log.hints_off:
            make_hints = partial(_hints, context, setup, folder, position)
            sinks.append(GuardedSink("hints", make_hints, log))
        if config.log.graph == "on" and not position:
            _show_graph(board, context, setup)
        sinks += [GuardedSink(f"--log.sinks {name}", partial(make, context.path), log)
                  for name, make in setup.sinks.items()]
    metrics.show_in(sinks, unshown)


def open_timing(
    path: Path, identity: RunIdentity, world: World, log: Log, workers: int
) -> StepTiming:
    """Create the timing of the steps. Rank 0 writes the file."""
    on_cuda = world.device.type == "cuda"
    timing = StepTiming(rank=world.rank, size=world.size, attempt=identity.attempt, workers=workers,
                        cores=share_of_cores(world.local_size), warn=log.warning,
                        memory=partial(device_mb, world.device) if on_cuda else resident_mb)
    if world.is_main:
        timing.open(path / layout.TIMING)
    return timing


def _report_gaps(
    path: Path, kept: Sequence[dict[str, Any]], position: int, log: Log, *, from_other_run: bool
) -> None:
    """Warn about steps whose lines are missing in the record: these steps are not repeated."""
    present = {line["step"] for line in kept if not line_key(line)[1]}
    # A run that continues another one has that one's steps in another record.
    begin = min(present, default=position + 1) if from_other_run else 1
    if lost := [step for step in range(begin, position + 1) if step not in present]:
        log.warning(f"{display_path(path)}: the lines of {len(lost)} of {position} steps are gone "
                    f"(the first is step {lost[0]}, the last {lost[-1]}), and no checkpoint holds "
                    "them; compare will report them as missing. The training itself is not "
                    "affected. To repair the record, put a copy of the file there before the next "
                    "start")
        log.event("lines-lost", first=lost[0], last=lost[-1], count=len(lost))


def _norms_before(kept: Sequence[dict[str, Any]], first: int) -> list[float]:
    """Return the gradient norms of the steps before `first`, since the last validation."""
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
    """Yield each parameter, and its last applied gradient, by name, on the CPU."""
    for name, parameter in model.named_parameters():
        yield f"parameters/{name}", parameter.detach().float().cpu().numpy()
        if parameter.grad is not None:
            yield f"gradients/{name}", parameter.grad.to_dense().float().cpu().numpy()


def _hints(context: Context, setup: Setup, folder: RunFolder, position: int) -> Hints:
    """Create the hints. Those about the data, the model and the batch are shown now."""
    config, world, data = context.config, context.world, setup.data
    expected = setup.task.first_loss() if hasattr(setup.task, "first_loss") else None
    facts = HintFacts(
        total=setup.intervals.total, epoch=setup.plan.steps_per_epoch,
        clip_norm=0.0 if config.clip.value else config.clip.norm,
        micro_size=config.batch.micro_size, per_rank=config.batch.global_size // world.size,
        expected_loss=0.0 if config.init is not None else expected,
        zero_gradients=partial(_zero_gradients, setup.model), memory=partial(_memory, world.device))
    folder.given_hints.update(config.log.hints_off)
    hints = Hints(context.log, facts, done=folder.given_hints,
                  lines=sample_records(context.path / layout.METRICS))
    hints.emit("small-batchnorm", check_batchnorm(
        startup_summary.batchnorm_samples(config, world.size, setup.card)))
    if world.device.type == "cuda":
        widths = [(name, width) for name, module in setup.model.named_modules()
                  for attribute in ("out_features", "out_channels", "num_embeddings")
                  if isinstance(width := getattr(module, attribute, None), int)]
        hints.emit("odd-sizes", check_sizes(widths, config.batch.micro_size))
    if not position:
        hints.emit("shared-samples", shared_samples(data["train"], data["validation"]))
    return hints


def _zero_gradients(model: nn.Module) -> list[str]:
    """Return the parameters whose gradient is exactly zero. Synchronizes with the device."""
    gradients = [(n, p.grad) for n, p in model.named_parameters()
                 if p.grad is not None and p.grad.numel()]
    if not gradients:
        return []
    largest = torch._foreach_norm([g for _, g in gradients], math.inf)
    values = torch.stack([value.float() for value in largest]).tolist()
    return [name for (name, _), value in zip(gradients, values, strict=True) if value == 0]


def _memory(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device),
            torch.cuda.get_device_properties(device).total_memory)


def trace_graph(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
    """Trace a model (a GraphDef) with the inputs that the task's loss passes to it for this batch.

    Raises:
        RuntimeError: the model can't be traced, or the loss doesn't call it as a module.
    """
    seen: list[tuple[Any, ...]] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    training = model.training
    model.eval()
    try:
        with (rng.preserved(), torch.no_grad(), torch_private.uncompiled(model),
              warnings.catch_warnings(action="ignore")):
            loss(model, batch)
            hook.remove()
            if not seen:
                raise RuntimeError("the task's loss doesn't call model(…) with positional inputs")
            return torch_private.tensorboard_graph(model, seen[0])
    finally:
        hook.remove()
        model.train(training)


def _show_graph(board: TensorBoard, context: Context, setup: Setup) -> None:
    """Show the graph of the model in TensorBoard. A failure is only a warning."""
    try:
        data = setup.data["train"]
        if isinstance(data, IterableDataset):
            raise RuntimeError("the training data is a stream, which isn't read for a graph")
        collate = getattr(setup.task, "collate", batches.collate)
        samples = KeyedSamples(data, seed=context.config.seed, collate=collate, augment=False)
        with rng.preserved():
            batch = samples[MicroBatchSpec(0, 0, 0, True, (0, min(1, len(data) - 1)))].batch
        board.graph(trace_graph(setup.model, setup.task.loss,
                                to_device(batch, context.world.device)))
    except Exception as error:
        context.log.warning(f"no graph of the model: {type(error).__name__}: {error}")


def show_samples(board: TensorBoard, task: Any, log: Log) -> None:
    """Show some samples of the task in TensorBoard. A failure is only a warning."""
    try:
        if hasattr(task, "preview"):
            board.samples(task.preview(32))
    except Exception as error:
        log.warning(f"no picture of samples: the task's preview(32), uint8 N×C×H×W: "
                    f"{type(error).__name__}: {error}")
