"""Construct the parts of a run from its configuration. No other module constructs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.data import IterableDataset

from trainer import task
from trainer.checkpoint import pretrained
from trainer.checkpoint.checkpointer import Checkpointer, RunRecord, SavePolicy
from trainer.checkpoint.progress import BestTracker, LossMeter, ScheduleLengths, TrainProgress
from trainer.checkpoint.replication import copy_missing_checkpoints
from trainer.checkpoint.restore import CheckpointRef, find_checkpoint, find_checkpoint_at
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import EMA, MODEL, OPTIMIZER, TrainState
from trainer.config import command_line, compatibility
from trainer.config.schema import Config
from trainer.data import batch as batches
from trainer.data.loader import Loader
from trainer.data.map_dataset import in_memory
from trainer.data.sampler import MicroBatchSpec
from trainer.data.shared_samples import shared_samples
from trainer.distributed import ddp, rank_invariant_reduction
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.optim import compile_cache, nan_detection, precision, schedules
from trainer.optim.bad_step_check import Health
from trainer.optim.ema import Ema
from trainer.resilience import fault_injection
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run import run_dir, startup_checks
from trainer.run.context import Claim, Context
from trainer.run.evaluate import Evaluator
from trainer.run.pictures import FOLDER, Pictures
from trainer.run.prepare import Setup, prepare, refuse_unreachable_faults
from trainer.run.recorders import RecordedRun, open_metrics, open_source, open_timing
from trainer.run.run import Run
from trainer.run.startup_summary import log_startup, startup_warnings, summary_lines
from trainer.step import Step
from trainer.storage import files, layout
from trainer.storage.locks import RunLock
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The state of the run, and how it is saved and recorded."""

    state: TrainState
    health: Health
    checkpoint: Checkpointer
    metrics: Metrics
    circumstances: dict[str, Any]
    """Facts besides the configuration on which bits depend; saved with each checkpoint."""
    inexact: list[str]
    """Reasons why this run is no longer exact; saved with each checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where the run continues."""

    found: CheckpointRef | None
    verdict: compatibility.ResumeDecision
    position: int
    """Completed steps."""


def build(
    config: Config[Any], world: World, log: Log, stop: StopSignals, marks: ProgressMarks
) -> Run:
    """Collective. Construct the run, in the same way on every rank.

    Raises:
        ConfigError: the configuration doesn't fit the data, the model, the ranks or the run that
            is resumed, on any rank: all raise, before anything is changed.
    """
    log.status.enter(Phase.BUILD)
    # Absolute paths: a task may call chdir.
    path, named, init = (Path(p or "").absolute() for p in (
        config.run or f"runs/{command_line.DEFAULT_RECIPE}", config.resume, config.init))
    context = Context(config=config, world=world, log=log, stop=stop, marks=marks, path=path)
    work = _agreed(world, partial(prepare, config, world))
    startup_checks.check_data(work, world)
    claim = _claim(context, work)
    saving = _make_state(context, work, claim)
    resumption = _find_position(context, work, claim, saving, named, init)
    given_hints = _enter_folder(context, work, claim, saving, resumption)
    step = _make_step(context, work, claim, saving)
    return _open(context, work, claim, saving, resumption, step, given_hints)


def _claim(context: Context, work: Setup) -> Claim:
    """Collective. Find out which run the folder holds, and arm the injected faults."""
    config, world, log, path = context.config, context.world, context.log, context.path
    identity = run_dir.identify_run(path, world, log, resume=config.resume)
    lock = RunLock(path / layout.LOCK, world.nonce, revoked=lambda: world.superseded)
    drills = [fault_injection.parse_fault(text) for text in config.inject]
    refuse_unreachable_faults(drills, config, work, world, first=identity.attempt == 0)
    injector = fault_injection.FaultInjector(
        drills, rank=world.rank, attempt=identity.attempt, marks=path / layout.FAULTS, log=log,
    )  # fmt: skip
    if injector:
        context.marks.subscribe(injector)
    return Claim(identity=identity, lock=lock, injector=injector)


def _make_state(context: Context, work: Setup, claim: Claim) -> Saving:
    """Make the state of a new run, its checkpointer and its metrics."""
    config, world, marks = context.config, context.world, context.marks
    horizon = ScheduleLengths(epoch=work.plan.steps_per_epoch, total=work.intervals.total)
    health = Health(config.nonfinite)
    state = TrainState(
        model=work.model, optimizer=work.optimizer,
        schedule=schedules.make_schedule(config.schedule, work.optimizer, horizon),
        scaler=precision.scaler(work.choice, world.device, config.precision.loss_scale),
        progress=TrainProgress(), best=BestTracker(), meter=LossMeter(), seed=config.seed,
        num_ranks=world.size, parts={"horizon": horizon, "health": health},
    )
    if state.schedule.metric and work.data["validation"] is None:
        raise ConfigError("--schedule.name plateau: it lowers the rate when a validation metric "
                          "stops improving, but the task has no validation data.")
    metrics = Metrics()
    circumstances = {
        "task": command_line.task_path(config.task), "data": work.fingerprint,
        "world_size": world.size,
        "threads": world.threads, "device": run_dir.device_name(world.device),
        "cpu": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
    inexact: list[str] = []
    keep_every = config.checkpoint.keep_every.steps(epoch=horizon.epoch, total=horizon.total)
    checkpoint = Checkpointer(
        store=Store(
            context.path / layout.CHECKPOINTS, run=claim.identity.run, keep=config.checkpoint.keep,
            keep_every=keep_every or None, guard=claim.lock.committing,
            mark=lambda point: marks.mark(point, checkpoint.saved_step),
        ),
        state=state, world=world, log=context.log, marks=marks,
        record=RunRecord(
            run_id=claim.identity.run, metrics=metrics,
            attempt={"settings": compatibility.settings(config), "circumstances": circumstances,
                     "inexact": inexact}),
        policy=SavePolicy(on_error=config.checkpoint.on_error, every_s=config.checkpoint.every_s),
    )  # fmt: skip
    return Saving(state=state, health=health, checkpoint=checkpoint, metrics=metrics,
                  circumstances=circumstances, inexact=inexact)


def _find_position(
    context: Context, work: Setup, claim: Claim, saving: Saving, named: Path, init: Path
) -> Resumption:
    """Collective. Find the checkpoint to continue from, or begin with initial weights.

    Args:
        named: the folder that --resume names.
        init: the weights that --init names.
    """
    config, world, log, state = context.config, context.world, context.log, saving.state
    found = _find(config, named, saving.checkpoint.store, claim.identity.run, world, log)
    verdict = compatibility.ResumeDecision()
    if found is not None:
        then = found.state.circumstances
        by_number = config.parallel.reduction == "canonical"
        if config.world.threads == "auto" and (by_number or then.get("world_size") == world.size):
            world.use_threads(then["threads"])  # bits depend on their number
            saving.circumstances["threads"] = world.threads
        verdict = compatibility.compare_settings(
            config, found.state.settings, now=saving.circumstances, then=then,
            before=found.state.inexact)
        saving.inexact.extend(verdict.reasons)
        state.progress.restore(found.state.progress)
    elif config.init is not None:
        work.card["init"] = _agreed(world, partial(
            pretrained.load_initial_weights, work.model, init, strict=config.init_strict == "on"))
    if found is None:
        startup_checks.check_weights(work, world, log)
        startup_checks.check_sample_reproducibility(work, log, config.seed)
    position = state.progress.step
    log.status.move_to(position)
    _arm(claim.injector, saving.checkpoint, state)
    waited = found is not None and found.state.best.waited
    if position >= work.intervals.total or 0 < config.eval.patience <= waited:
        run_dir.refuse_finished(context.path, world, position)
    return Resumption(found=found, verdict=verdict, position=position)


def _enter_folder(
    context: Context, work: Setup, claim: Claim, saving: Saving, resumption: Resumption
) -> set[str]:
    """Collective. Take the run folder, begin the attempt, and bring each node up to date.

    Returns:
        The hints that earlier attempts have given.
    """
    config, world, log, path = context.config, context.world, context.log, context.path
    run_dir.enter(path, claim.identity, claim.lock, world, log)
    events = read_events(path / layout.EVENTS) if world.is_main and claim.identity.attempt else []
    run_dir.begin(path, events, world, log, position=resumption.position,
                  version=_version(config), max_same_step=config.restart.max_same_step)
    copy_missing_checkpoints(resumption.found, saving.checkpoint.store, claim.identity.run,
                             world, log)
    context.marks.mark(Phase.START, resumption.position)
    if work.choice.compile:
        context.stop.shield()  # compilers survive a signal to the whole process group
        compile_cache.use(path / layout.COMPILED, world)
    return {event["hint"] for event in events if event.get("event") == "hint"}


def _make_step(context: Context, work: Setup, claim: Claim, saving: Saving) -> Step:
    """Collective. Wrap the model, and make the optimizer step of this run."""
    config, world, log = context.config, context.world, context.log
    state, checkpoint, health = saving.state, saving.checkpoint, saving.health
    wrapped, objective = _wrap(config, work, world)
    if config.optim.ema:
        state.ema = Ema(work.model, config.optim.ema, before=checkpoint.finish_copy)
    claim.injector.actions["nan"] = partial(setattr, objective, "inject_nan", True)
    step = Step(
        objective=objective, wrapped=wrapped, model=work.model, optimizer=work.optimizer,
        schedule=state.schedule, scaler=state.scaler,
        autocast=precision.autocast(work.choice, world.device), clip=config.clip,
        progress=state.progress, seed=config.seed, num_ranks=world.size,
        nominal_count=config.batch.global_size, status=log.status, marks=context.marks,
        broadcast=world.broadcast, health=health, ema=state.ema,
        all_sum=world.all_sum, before_update=checkpoint.finish_copy,
    )  # fmt: skip
    if config.parallel.reduction == "canonical":
        rank_invariant_reduction.use_rank_invariant_reduction(step, world, work.plan,
                                                              config.parallel.find_unused)
    if config.numerics.anomaly == "on":
        step.nan_detector = lambda spec: nan_detection.nan_detector(wrapped, work.model,
                                                                    partial(_report_nan, log, spec))
    if isinstance(work.data["train"], IterableDataset):
        # The length of an epoch is unknown: the first incomplete window ends it.
        whole = config.data.drop_last == "on"
        step.min_samples = config.batch.global_size if whole else 1
    return step


def _open(
    context: Context, work: Setup, claim: Claim, saving: Saving, resumption: Resumption, step: Step,
    given_hints: set[str],
) -> Run:
    """Open the data and the record at the position of the run; returns the run."""
    config, world, log, path = context.config, context.world, context.log, context.path
    state, metrics, found = saving.state, saving.metrics, resumption.found
    workers = loader_workers(config, work.data["train"], world)
    at_place = partial(open_source, config, work, world, state, workers)
    hints_off = {"all", "shared-samples"} & {*config.log.hints_off}
    leak = ""
    if world.is_main and found is None and not hints_off:
        leak = shared_samples(work.data["train"], work.data["validation"], seed=config.seed)
    loader = Loader(at_place(found), device=world.device, marks=context.marks, log=log,
                    at_once=not workers)
    recorded = RecordedRun(
        config=config, work=work, world=world, path=path, log=log, given_hints=given_hints,
        run_id=claim.identity.run, guard=claim.lock.committing)

    def reopen(found: CheckpointRef) -> None:
        state.progress.restore(found.state.progress)
        loader.reopen(partial(at_place, found))
        open_metrics(metrics, recorded, found)

    evaluators = _make_evaluators(context, work, state, step, workers)
    card = work.card | {
        "workers": workers, "precision": str(work.choice), "fingerprint": work.fingerprint,
    }  # fmt: skip
    about = _describe(context, work, card, resumption, saving.checkpoint.store) if (
        world.writes_run_dir) else []
    open_metrics(metrics, recorded, found, summary=about, leak=leak)
    pictures = None
    if world.is_main and hasattr(work.task, "picture"):
        pictures = Pictures(draw=work.task.picture, folder=path / FOLDER, model=work.model,
                            show=metrics.picture, log=log)
    return Run(
        config=config, path=path, identity=claim.identity, world=world, log=log,
        stop=context.stop, faults=claim.injector, marks=context.marks, lock=claim.lock,
        state=state, step=step, loader=loader, validate=evaluators["validation"],
        test=evaluators["test"], checkpoint=saving.checkpoint, metrics=metrics,
        intervals=work.intervals, found=found, card=card, reopen=reopen, pictures=pictures,
        replica_check=ReplicaCheck(partial(_shared, state, step), world, resumption.position),
        timing=open_timing(path, claim.identity, world, log, workers),
    )  # fmt: skip


def _make_evaluators(
    context: Context, work: Setup, state: TrainState, step: Step, workers: int
) -> dict[str, Evaluator | None]:
    """Evaluators of the validation and the test set; None for a split without data."""
    config, world, log, stop = context.config, context.world, context.log, context.stop
    collate = getattr(work.task, "collate", batches.collate)
    return {
        split: None if work.data[split] is None else Evaluator(
            model=work.model, loss=work.task.loss, dataset=work.data[split], collate=collate,
            batch_size=evaluation_batch(config), workers=workers, seed=config.seed,
            rank=world.rank, num_ranks=world.size, device=world.device, autocast=step.autocast,
            all_sum=world.all_sum, marks=context.marks, step=lambda: state.progress.step,
            epoch=lambda: work.plan.epoch_of(max(1, state.progress.step)),
            weights=contextlib.nullcontext if state.ema is None else state.ema.exchanged,
            stopped=lambda: stop.requested, warn_once=log.warn_once, figures=work.figures,
        )
        for split in ("validation", "test")
    }  # fmt: skip


def _describe(
    context: Context, work: Setup, card: dict[str, Any], resumption: Resumption, store: Store
) -> list[str]:
    """Write configuration and environment into the run folder; returns the start-up summary."""
    config, world, path = context.config, context.world, context.path
    about = summary_lines(config, card, world, path)
    run_dir.clean(path)
    files.replace_text(path / layout.CONFIG, command_line.to_toml(config))
    label, why = _determinism(config, world, resumption.verdict)
    files.replace_json(path / layout.ENVIRONMENT,
                       run_dir.environment(world, card, label=label, why=why))
    store.clean()
    warnings = startup_warnings(config, card, epoch=work.plan.steps_per_epoch,
                                total=work.intervals.total)
    log_startup(context.log, about, warnings, resumption.found, resumption.verdict, path)
    return about


def _version(config: Config[Any]) -> str:
    """Digest of the configuration and the task's source file.

    If it has changed, a failure at the same step does not count as a repetition.
    """
    hasher = xxhash.xxh3_64(command_line.to_toml(config).encode())
    hasher.update(task.source_code(config.task))
    return hasher.hexdigest()


def _agreed(world: World, make: Callable[[], Any]) -> Any:
    """Collective. Return the result of `make`; an error on one rank is raised on all."""
    made, error = None, None
    try:
        made = make()
    except Exception as problem:
        error = problem
    world.raise_on_all_ranks(error)
    return made


def _wrap(config: Config[Any], work: Setup, world: World) -> tuple[nn.Module, ddp.Objective]:
    if work.choice.compile:
        # Compile for each size separately: after a second size, torch would generate code for
        # any size. That code rounds differently, and a restart has seen only one size. Compile in
        # place: the names in the state dict stay plain.
        work.model.compile(dynamic=False if config.numerics.deterministic == "on" else None)
    group = world.group if config.parallel.reduction == "ddp" else None
    objective = ddp.Objective(
        work.model, work.task.loss, num_ranks=world.size if group else 1,
        nominal_count=config.batch.global_size, device=world.device,
    )  # fmt: skip
    wrapped = ddp.wrap(objective, group=group, device=world.device,
                       bucket_mb=config.parallel.bucket_mb,
                       find_unused=config.parallel.find_unused == "on")
    return wrapped, objective


def _shared(state: TrainState, step: Step) -> dict[str, torch.Tensor]:
    """Tensors that must be equal on all ranks: parameters, their average, optimizer state, and
    the buffers that the step keeps equal."""
    parameters, tensors = dict(state.model.named_parameters()), state.tensors()
    buffers = {name: b for name, b in state.model.named_buffers() if b in step.replicated_buffers}
    average = {f"average of {name}": tensor for name, tensor in tensors.get(EMA, {}).items()}
    return parameters | buffers | tensors[OPTIMIZER] | average


def _report_nan(log: Log, spec: MicroBatchSpec, origin: nan_detection.Origin) -> None:
    log.event("anomaly", at_step=spec.step, micro_batch=spec.number, **vars(origin))
    log.warning(f"step {spec.step}, micro-batch {spec.number}: a NaN is made by {origin}")


def _find(
    config: Config[Any], named: Path, store: Store, run: str, world: World, log: Log
) -> CheckpointRef | None:
    # After a restart, this run's newest checkpoint takes precedence over the PATH of --resume.
    found = find_checkpoint(store, world, run)
    if config.resume not in ("auto", "never"):
        if found is None:
            found = find_checkpoint_at(named, world)
        else:
            log.info(f"--resume {config.resume} is ignored: the run already has a checkpoint")
    if found is not None:
        for why in found.skipped:
            log.warning(f"checkpoint skipped: {why}")
            log.event("checkpoint-skipped", why=why)
    return found


def _arm(
    injector: fault_injection.FaultInjector, checkpoint: Checkpointer, state: TrainState
) -> None:
    """Set the actions of the injected faults that need the checkpointer or the state."""

    def flip() -> None:
        checkpoint.finish_copy()
        parameter = next(p for p in state.model.parameters() if p.numel())
        memory = torch.empty(0, dtype=torch.uint8, device=parameter.device)
        memory.set_(parameter.untyped_storage())[0] ^= 1

    def corrupt() -> None:
        checkpoint.abandon()  # the newest one may still be in flight
        saved = checkpoint.store.checkpoints()
        if not saved:
            raise fault_injection.InjectedFault("--inject corrupt: there is no checkpoint yet; "
                                                "give a step after the first save")
        newest = saved[-1].path / MODEL
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)

    def no_space() -> None:
        raise fault_injection.no_space(checkpoint.store.folder)

    injector.actions |= {"flip": flip, "corrupt": corrupt, "enospc": no_space}


def loader_workers(config: Config[Any], dataset: Any, world: World) -> int:
    """Number of loader processes; auto: 0 for data in memory and in a daemonic process."""
    none = in_memory(dataset) or torch.multiprocessing.current_process().daemon
    auto = 0 if none else min(2, max(1, world.threads - 1))
    return auto if config.data.workers == "auto" else config.data.workers


def evaluation_batch(config: Config[Any]) -> int:
    """Samples in one forward of an evaluation."""
    size = config.eval.batch_size
    return 2 * config.batch.micro_size if size == "auto" else size


def _determinism(
    config: Config[Any], world: World, verdict: compatibility.ResumeDecision
) -> tuple[str, str]:
    if config.numerics.deterministic == "off" and world.device.type != "cpu":
        return "equivalent", "--numerics.deterministic is off"
    if world.device.type == "mps":
        return "equivalent", "mps has no deterministic kernels"
    return verdict.label, verdict.why
