"""Open the data source and the record of a run, at the start and after a rollback."""

from __future__ import annotations

import itertools
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
from trainer.data.batch import to_device
from trainer.data.loader import MicroBatchSource
from trainer.data.map_dataset import KeyedSamples, shared_samples
from trainer.data.sampler import MicroBatchSampler, MicroBatchSpec
from trainer.data.stream import StreamReader
from trainer.data.workers import DataReader
from trainer.distributed import torch_private
from trainer.distributed.device import device_mb, share_of_cores
from trainer.resilience.attempts import running_s
from trainer.run import startup_summary
from trainer.run.carry_over import carry_over
from trainer.run.context import Context, RunFolder
from trainer.run.evaluate import eval_mode
from trainer.run.prepare import REMEDY, Setup, is_due
from trainer.run.run import Run
from trainer.run.saved_run import record_first_call
from trainer.storage import layout
from trainer.storage.files import display_path
from trainer.storage.jsonl import last_records, read_records, sample_records
from trainer.task import method_of
from trainer.telemetry.console import Console
from trainer.telemetry.events import EVENT, Log
from trainer.telemetry.hints import HintFacts, Hints, check_batchnorm, check_sizes
from trainer.telemetry.metrics import METRIC_LINE, Sink, line_key
from trainer.telemetry.step_timing import TIMING_LINE, StepTiming, resident_mb
from trainer.telemetry.tensorboard import NORMS, GuardedSink, TensorBoard
from trainer.telemetry.wandb import WandB


def open_source(
    context: Context, setup: Setup, state: TrainState, found: CheckpointRef | None
) -> MicroBatchSource:
    """Open the source of the micro-batches at the position of `state.progress`. A stream becomes a
    part of the state, and begins at its position in the checkpoint `found`."""
    config, world, data = context.config, context.world, setup.data["train"]
    if (spec := setup.stream_spec(config)) is not None:
        stream = StreamReader(
            spec, rank=world.rank, num_ranks=world.size, workers=setup.workers,
            prefetch=config.data.prefetch, device=world.device,
            step=lambda: state.progress.step, gather=world.gather_json)
        state.parts["stream"] = stream  # another one after a roll-back
        if found is not None and "stream" in found.state.parts:
            stream.load_state_dict(found.state.parts["stream"])
        return stream
    sampler = MicroBatchSampler(
        setup.plan, rank=world.rank, num_ranks=world.size, order=setup.order,
        position=state.progress.step, total_steps=setup.intervals.total)
    samples = KeyedSamples(data, seed=config.seed, collate=setup.collate, rank=world.rank,
                           skip=config.data.on_error == "skip", advice=REMEDY)
    return DataReader(samples, sampler=sampler, workers=setup.workers,
                      prefetch=config.data.prefetch, device=world.device)


def reopen(run: Run, found: CheckpointRef) -> None:
    """Collective. Read and record the run from the position of a checkpoint, for a roll-back."""
    run.state.progress.restore(found.state.progress)
    setup, _ = carry_over(run.context.config, run.setup, found)
    run.loader.reopen(partial(open_source, run.context, setup, run.state, found))
    open_metrics(run.context, run.setup, run.folder, found)


def open_metrics(
    context: Context, setup: Setup, folder: RunFolder, found: CheckpointRef | None, *,
    summary: Sequence[str] = (),
) -> None:  # fmt: skip
    """Collective. Open metrics.jsonl, cut to the step that is resumed, and the sinks."""
    file, log, metrics = context.path / layout.METRICS, context.log, folder.metrics
    metrics.close()
    record, end = resume_record(found, file, context.world)
    metrics.continue_at(end)
    if not context.world.writes_run_dir:
        return
    position = 0 if found is None else found.step
    if not record.begin.offset:
        _report_gaps(context, record.kept, position)
    metrics.open(file, record, guard=folder.lock.committing, warn=log.warning)
    history, unshown = last_records(file, NORMS, METRIC_LINE), record.unshown
    first = min((line["step"] for line in unshown), default=position + 1)
    if position >= setup.intervals.total:  # the final metrics are shown again
        first = min(first, position)
        unshown = [line for line in history if line["step"] >= first]
    board = _open_tensorboard(context, setup, history, first if position else 0)
    board.introduce(summary, log.attempt)
    if folder.mirror is not None:
        board.show_figures(folder.mirror.figures)
    if not position:
        show_samples(board, setup.task, log)
        if context.world.is_main and context.config.log.graph == "on":
            _show_graph(board, context, setup)
    metrics.show_in([board, *_other_sinks(context, setup, folder, position)], unshown)


def _report_gaps(context: Context, kept: Sequence[dict[str, Any]], position: int) -> None:
    """Warn about steps whose lines are missing in the record: these steps are not repeated."""
    present = {line["step"] for line in kept if not line_key(line)[1]}
    # A run that continues another one has that one's steps in another record.
    continues_other = context.config.resume not in ("auto", "never")
    begin = min(present, default=position + 1) if continues_other else 1
    lost = position + 1 - begin - sum(begin <= step <= position for step in present)
    if lost > 0:
        first = next(step for step in itertools.count(begin) if step not in present)
        last = next(step for step in itertools.count(position, -1) if step not in present)
        context.log.warning(
            f"{display_path(context.path / layout.METRICS)}: the lines of {lost} of {position}"
            f" steps are gone (the first is step {first}, the last {last}), and no checkpoint"
            " holds them; compare will report them as missing. The training itself is not affected."
            " To repair the record, put a copy of the file there before the next start")
        context.log.event("lines-lost", first=first, last=last, count=lost)


def _open_tensorboard(
    context: Context, setup: Setup, history: Sequence[dict[str, Any]], first: int
) -> TensorBoard:
    """Open TensorBoard, in which `first` is the next step to be shown."""
    log, intervals = context.config.log, setup.intervals
    return TensorBoard(
        context.path / layout.TENSORBOARD, every=_scalar_interval(context, setup), first=first,
        is_validated=partial(is_due, interval=intervals.evaluate, last=intervals.total),
        history=itertools.takewhile(lambda line: line["step"] < first, history),
        class_names=getattr(setup.task, "class_names", ()),
        histograms_every=setup.steps(log.histograms), tensors=partial(_tensors, setup.model))


def _scalar_interval(context: Context, setup: Setup) -> int:
    """Steps between the scalars of TensorBoard."""
    every, total = context.config.log.tensorboard_every, setup.intervals.total
    return min(50, total // 500) or 1 if every == "auto" else setup.steps(every) or total


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each parameter, and its last applied gradient, by name, on the CPU."""
    for name, parameter in model.named_parameters():
        yield f"parameters/{name}", parameter.detach().float().cpu().numpy()
        if parameter.grad is not None:
            yield f"gradients/{name}", parameter.grad.to_dense().float().cpu().numpy()


def show_samples(board: TensorBoard, task: Any, log: Log) -> None:
    """Show some samples of the task in TensorBoard. A failure is only a warning."""
    try:
        if preview := method_of(task, "preview"):
            board.samples(preview(32))
    except Exception as error:
        log.warning(f"no picture of samples: the task's preview(32), uint8 N×C×H×W: "
                    f"{type(error).__name__}: {error}")


def _show_graph(board: TensorBoard, context: Context, setup: Setup) -> None:
    """Show the graph of the model in TensorBoard. A failure is only a warning."""
    try:
        data = setup.data["train"]
        if isinstance(data, IterableDataset):
            raise RuntimeError("the training data is a stream, which isn't read for a graph")
        samples = KeyedSamples(data, seed=context.config.seed, collate=setup.collate, augment=False)
        with rng.preserved():
            batch = samples[MicroBatchSpec(0, 0, 0, True, (0, min(1, len(data) - 1)))].batch
        board.graph(trace_graph(setup.model, setup.task.loss,
                                to_device(batch, context.world.device)))
    except Exception as error:
        context.log.warning(f"no graph of the model: {type(error).__name__}: {error}")


def trace_graph(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
    """Trace a model (a GraphDef) with the inputs that the task's loss passes to it for a batch."""
    with (eval_mode(model), torch.no_grad(), torch_private.uncompiled(model),
          warnings.catch_warnings(action="ignore")):
        call = record_first_call(model, loss, batch)
        return torch_private.tensorboard_graph(model, call.args)


def _other_sinks(
    context: Context, setup: Setup, folder: RunFolder, position: int
) -> Iterator[Sink]:
    """Open the sinks besides TensorBoard, on rank 0."""
    config, log, total = context.config, context.log, setup.intervals.total
    if not context.world.is_main:
        return
    console = Console(log, total=total, every=setup.intervals.log or total, start=position,
                      bar=sys.stderr.isatty() and config.log.level in ("debug", "info"),
                      restarts=log.attempt,
                      earlier_s=_earlier_s(context.path) if position else 0.0)
    if folder.mirror is not None:
        console.show_note(folder.mirror.behind)
    yield console
    if config.log.wandb != "off":
        make_wandb = partial(
            WandB, context.path, folder.identity.run_id, mode=config.log.wandb,
            every=_scalar_interval(context, setup),
            settings=compatibility.settings(config),
            class_names=getattr(setup.task, "class_names", ()))
        yield GuardedSink(f"--log.wandb {config.log.wandb}", make_wandb, log)
    if "all" not in config.log.hints_off:
        yield GuardedSink("hints", partial(_open_hints, context, setup, folder, position), log)
    for name, make in setup.sinks.items():
        yield GuardedSink(f"--log.sinks {name}", partial(make, context.path), log)


def _earlier_s(path: Path) -> float:
    """Seconds that the run in a folder has been running."""
    return running_s(record for file, kind in ((layout.EVENTS, EVENT), (layout.TIMING, TIMING_LINE))
                     for record in read_records(path / file, kind=kind)
                     if {"time", "attempt"} <= record.keys())


def _open_hints(context: Context, setup: Setup, folder: RunFolder, position: int) -> Hints:
    """Create the hints. Those about the data, the model and the batch are shown now."""
    config, world, model, data = context.config, context.world, setup.model, setup.data
    expected = call() if (call := method_of(setup.task, "first_loss")) else None
    on_cuda = world.device.type == "cuda"

    def memory() -> tuple[int, int] | None:
        return (torch.cuda.max_memory_allocated(world.device),
                torch.cuda.get_device_properties(world.device).total_memory) if on_cuda else None

    facts = HintFacts(
        total=setup.intervals.total, epoch=setup.plan.steps_per_epoch,
        clip_norm=config.clip.norm or 0.0,
        micro_size=config.batch.micro_size, per_rank=config.batch.global_size // world.size,
        expected_loss=0.0 if config.init is not None else expected,
        zero_gradients=partial(_zero_gradients, model), memory=memory)
    folder.given_hints.update(config.log.hints_off)
    hints = Hints(context.log, facts, done=folder.given_hints,
                  lines=sample_records(context.path / layout.METRICS, METRIC_LINE))
    hints.emit("small-batchnorm", check_batchnorm(
        startup_summary.batchnorm_samples(config, world.size, setup.card)))
    if on_cuda:
        widths = [(name, width) for name, module in model.named_modules()
                  for attribute in ("out_features", "out_channels", "num_embeddings")
                  if isinstance(width := getattr(module, attribute, None), int)]
        hints.emit("odd-sizes", check_sizes(widths, config.batch.micro_size))
    if not position:
        hints.emit("shared-samples", shared_samples(data["train"], data["validation"]))
    return hints


def _zero_gradients(model: nn.Module) -> list[str]:
    """The parameters whose gradient is exactly zero. The host waits once for the device."""
    found = {name: p.grad.to_dense().any() for name, p in model.named_parameters()
             if p.grad is not None and p.grad.numel()}
    flags = torch.stack(list(found.values())).tolist() if found else []
    return [name for name, flag in zip(found, flags, strict=True) if not flag]


def open_timing(context: Context, setup: Setup, attempt: int) -> StepTiming:
    """Create the timing of the steps. Rank 0 writes the file."""
    world, device = context.world, context.world.device
    timing = StepTiming(
        rank=world.rank, size=world.size, attempt=attempt, workers=setup.workers,
        cores=share_of_cores(world.local_size), warn=context.log.warning,
        memory=partial(device_mb, device) if device.type == "cuda" else resident_mb)
    if world.is_main:
        timing.open(context.path / layout.TIMING)
    return timing
