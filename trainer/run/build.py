"""Build a run in stages, each of which returns a frozen value.

Three of them act on what an earlier one returned: `_find_resumption` loads the weights of --init,
`_enter_folder` takes the lock, and a stream adds its position to the training state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import pretrained
from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.checkpointer import Checkpointer, RunRecord
from trainer.checkpoint.mirror import MirrorEntry
from trainer.checkpoint.mirror_writer import MirrorPolicy
from trainer.checkpoint.progress import (
    BestTracker,
    EpochCalls,
    LossMeter,
    RateCycles,
    TrainProgress,
)
from trainer.checkpoint.replication import copy_missing_checkpoints
from trainer.checkpoint.restore import (
    CheckpointRef,
    check_fit,
    find_checkpoint,
    find_checkpoint_at,
)
from trainer.checkpoint.store import Store
from trainer.checkpoint.train_state import TrainState
from trainer.config import command_line, compatibility
from trainer.config.schema import Config
from trainer.data.loader import Loader
from trainer.distributed import ddp
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.optim import compile_cache, precision, schedules
from trainer.optim.bad_step_check import Health
from trainer.optim.ema import Ema
from trainer.optim.named_optimizers import turns_of
from trainer.optim.optimizers import FrozenAtFirst
from trainer.resilience import fault_injection
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run import circumstances, mirroring, run_dir, startup_checks
from trainer.run.carry_over import carry_over
from trainer.run.context import Context, Resumption, RunFolder
from trainer.run.evaluate import Evaluator
from trainer.run.guard import Clock, Guard
from trainer.run.pictures import Pictures
from trainer.run.prepare import Setup, prepare, validation_splits
from trainer.run.recorders import open_metrics, open_source, open_timing
from trainer.run.run import BuiltRun, Recorders, Trainable
from trainer.run.startup_summary import log_startup, startup_warnings, summary_lines
from trainer.step import Computes, ForwardBackward, Reduction, TurnParameters
from trainer.storage import files, layout
from trainer.storage.locks import RunLock
from trainer.storage.secrets import MASK
from trainer.task import method_of
from trainer.telemetry.events import Log, read_events
from trainer.telemetry.status import Phase


def build(
    config: Config[Any], world: World, log: Log, stop: StopSignals, marks: ProgressMarks
) -> BuiltRun:
    """Collective. Build the run. If the configuration doesn't fit the data, the model, the ranks or
    the run that is resumed on any rank, all raise ConfigError, before anything is changed."""
    log.status.enter(Phase.BUILD)
    # Absolute paths: a task may call chdir.
    path, resume_from, init = (Path(p or "").absolute() for p in (
        config.run or f"runs/{command_line.DEFAULT_RECIPE}", config.resume, config.init))
    context = Context(config=config, world=world, log=log, stop=stop, marks=marks, path=path,
                      resume_from=resume_from, init=init)
    setup = world.fail_together(partial(prepare, config, world))
    setup = startup_checks.check_data(setup, world, config)
    folder = _claim_folder(context, setup)
    setup, resumption = _find_resumption(context, setup, folder)
    # A later start may have another number of ranks.
    fixed = not (folder.identity.attempt or world.has_nodes
                 or config.parallel.reduction == "canonical")
    fault_injection.refuse_unreachable(folder.faults, ranks=world.size if fixed else None,
                                       total=setup.intervals.total)
    _enter_folder(context, setup, folder, resumption)
    trainable = _make_trainable(context, setup, folder, resumption)
    marks.mark(Phase.START, resumption.position)
    loader = Loader(open_source(context, setup, trainable.state, resumption.found),
                    device=world.device, marks=marks, log=log, at_once=not setup.workers)
    validations = {split: _make_evaluator(context, setup, trainable, split)
                   for split in validation_splits(setup.data)}
    test = (None if setup.data["test"] is None else
            _make_evaluator(context, setup, trainable, "test"))
    recorders = _open_recorders(context, setup, folder, resumption)
    guard = Guard(context=context, intervals=setup.intervals, lock=folder.lock,
                  faults=trainable.faults, state=trainable.state, boundary=trainable.boundary,
                  checkpoint=trainable.checkpoint, loader=loader, metrics=folder.metrics,
                  timing=recorders.timing, mirror=folder.mirror,
                  validation_clock=Clock(config.eval.every_s if validations else 0.0,
                                         expired=resumption.found is not None))
    return BuiltRun(context=context, setup=setup, folder=folder, resumption=resumption,
                    trainable=trainable, loader=loader, validations=validations, test=test,
                    recorders=recorders, guard=guard)


def _claim_folder(context: Context, setup: Setup) -> RunFolder:
    """Collective. Find out which run the folder holds; nothing is written yet."""
    config, world, path = context.config, context.world, context.path
    lock = RunLock(path / layout.LOCK, world.nonce, revoked=lambda: world.superseded)
    source = world.fail_together(partial(
        mirroring.look, context, partial(run_dir.take_lock, path, lock, world)))
    identity = run_dir.identify_run(path, world, context.log, resume=config.resume,
                                    mirrored=source.record)
    faults = [fault_injection.parse_fault(text) for text in config.inject]
    keep, keep_every = config.checkpoint.keep, setup.steps(config.checkpoint.keep_every) or None
    store = Store(path / layout.CHECKPOINTS, run=identity.run_id, keep=keep, keep_every=keep_every,
                  guard=lock.committing, mark=context.marks.mark)
    every = config.checkpoint.mirror_every
    policy = MirrorPolicy(every=None if every == "auto" else setup.steps(every), keep=keep,
                          keep_every=keep_every)
    return RunFolder(
        identity=identity, lock=lock, store=store, faults=faults, source=source,
        mirror=mirroring.make_uploads(source, store, path, policy, context.log),
        generation=mirroring.next_generation(source, store, world))


def _find_resumption(
    context: Context, setup: Setup, folder: RunFolder
) -> tuple[Setup, Resumption]:
    """Collective. Find the checkpoint to continue from; without one, initialize the weights.
    Returns the setup at its position."""
    config, world = context.config, context.world
    found = _find_checkpoint(context, folder)
    kernels = circumstances.inexact_kernels(config, setup.choice, world.device)
    if found is None:
        setup, doubts = startup_checks.check_streams(setup, world, context.log, config)
        if config.eval.every_s:
            doubts = [*doubts, "--eval.every-s: when it validates depends on the time"]
        report = [] if config.init is None else world.fail_together(partial(
            pretrained.load_initial_weights, setup.model, context.init,
            strict=config.init_strict == "on"))
        others = startup_checks.check_weights(setup, world, context.log)
        setup, more = startup_checks.check_sample_reproducibility(setup, context.log, config)
        return setup, Resumption(
            found=None, position=0, initial_weights=report,
            decision=compatibility.ResumeDecision(reasons=(*doubts, *others, *more, *kernels)),
            circumstances=circumstances.find(context, setup))
    setup = startup_checks.recall(setup, found.state.circumstances)
    found = replace(found, state=found.state.for_validation(setup.fingerprints))
    saved, then = found.state, found.state.circumstances
    if config.world.threads == "auto" and then.get("threads", world.threads) != world.threads and (
            then.get("world_size") == world.size or config.parallel.reduction == "canonical"):
        otherwise = f"{world.threads}" + f": {world.threads_reason}" * bool(world.threads_reason)
        world.use_threads(then["threads"], f"as before; auto would be {otherwise}")
    check_fit(found, folder.store, setup.model, world)
    setup, where = carry_over(config, setup, found)
    setup.lengths.set(setup.plan.steps_per_epoch, setup.intervals.total)
    if "horizon" in saved.parts:
        setup.lengths.load_state_dict(saved.parts["horizon"])
    now, position = circumstances.find(context, setup), saved.progress.step
    decision = compatibility.compare_settings(config, saved.settings, now=now, then=then,
                                              before=[*saved.inexact, *kernels])
    context.status.move_to(position)
    is_over = position >= setup.intervals.total or 0 < config.eval.patience <= saved.best.waited
    if is_over and not world.broadcast_json(folder.source.lacks_product(position)):
        run_dir.refuse_finished(context.path, world, position)
    if where:
        decision = replace(decision, changes=(*decision.changes, where))
    return setup, Resumption(found=found, decision=decision, position=position, circumstances=now)


def _find_checkpoint(context: Context, folder: RunFolder) -> CheckpointRef | None:
    """Collective. Find this run's newest checkpoint, which takes precedence over --resume PATH."""
    config, world, log = context.config, context.world, context.log
    found = find_checkpoint(folder.store, world, folder.identity.run_id, mirror=folder.source)
    if found is not None:
        entry = MirrorEntry(found.generation, found.step)
        world.fail_together(partial(folder.source.restore_records, entry, context.path))
    if config.resume not in ("auto", "never"):
        if found is None:
            found = find_checkpoint_at(context.resume_from, world)
        else:
            log.info(f"--resume {config.resume} is ignored: the run already has a checkpoint")
    for why in () if found is None else found.skipped:
        log.warning(f"checkpoint skipped: {why}")
        log.event("checkpoint-skipped", why=why)
    return found


def _enter_folder(
    context: Context, setup: Setup, folder: RunFolder, resumption: Resumption
) -> None:
    """Collective. Lock the run folder, begin the attempt, and bring each node up to date."""
    config, world, log, path = context.config, context.world, context.log, context.path
    run_dir.enter(path, folder.identity, folder.lock, world, log)
    is_over = resumption.position >= setup.intervals.total
    world.fail_together(partial(_make_room, context, folder.store, is_over=is_over))
    events = read_events(path / layout.EVENTS) if world.is_main and folder.identity.attempt else []
    folder.given_hints.update(event["hint"] for event in events if "hint" in event)
    # If configuration or task have changed, a failure at the same step is no repetition.
    version = circumstances.hash_json(
        [command_line.to_toml(config), resumption.circumstances["code"]])
    run_dir.begin(path, events, world, log, position=resumption.position, version=version,
                  max_same_step=config.restart.max_same_step)
    world.fail_together(partial(mirroring.take, folder, path, world, log))
    copy_missing_checkpoints(resumption.found, folder.store, folder.identity.run_id, world, log)
    if folder.mirror is not None:
        folder.mirror.start()
        if resumption.found is not None and resumption.found.path is None:  # no disk has it
            folder.mirror.offer(resumption.found.step, always=True)
    if setup.choice.compile:
        context.stop.shield()  # compilers survive a signal to the whole process group
        compile_cache.use(path / layout.COMPILED, world)


def _make_room(context: Context, store: Store, *, is_over: bool) -> None:
    """Delete what dead attempts have left, and wait until the next save has room."""
    if context.world.writes_run_dir:
        run_dir.clean(context.path)
        store.clean()
        files.when_not_full(partial(run_dir.check_room, context.path,
                                    store.room_to_go_on(is_over=is_over)), context.log.warning)


def _make_trainable(
    context: Context, setup: Setup, folder: RunFolder, resumption: Resumption
) -> Trainable:
    """Collective. Wrap the model, and make its state, which is not restored yet."""
    config, world, marks = context.config, context.world, context.marks
    boundary = StepBoundary(setup.model, context.status, context.log.warn_once, world.device)
    progress, health = TrainProgress(), Health(config.nonfinite)
    if resumption.found is not None:
        progress.restore(resumption.found.state.progress)
    parts: dict[str, Any] = {"horizon": setup.lengths, "health": health}
    if call := method_of(setup.task, "epoch"):
        parts["epoch"] = EpochCalls(call, config.seed)
    if config.checkpoint.keep_every == "cycle":
        parts["cycles"] = RateCycles()
    state = TrainState(
        model=setup.model, optimizer=setup.optimizer, schedule=setup.schedule,
        scaler=torch.amp.GradScaler(world.device.type, init_scale=config.precision.loss_scale,
                                    enabled=setup.choice.dtype is torch.float16),
        progress=progress, best=BestTracker(), meter=LossMeter(), seed=config.seed,
        num_ranks=world.size, parts=parts,
        ema=Ema(setup.model, config.optim.ema) if config.optim.ema else None,
        settings=compatibility.settings(config))
    attempt = {"settings": state.settings,
               "circumstances": {**resumption.circumstances, "samples": setup.plan.samples,
                                 "origin": astuple(setup.plan.origin)},
               "inexact": resumption.decision.reasons}
    checkpoint = Checkpointer(
        store=folder.store, state=state, world=world, log=context.log, marks=marks,
        record=RunRecord(run_id=folder.identity.run_id, metrics=folder.metrics, attempt=attempt,
                         generation=folder.generation, mirror=folder.mirror),
        config=config.checkpoint, boundary=boundary)
    precision.compile_model(setup.model, setup.choice, config.numerics)
    until = config.freeze_until.steps(epoch=setup.lengths.epoch, total=setup.lengths.total)
    make = partial(_make_computes, context, setup, boundary, state)
    computes = Computes(turns=make(FrozenAtFirst()), frozen_until=until,
                        at_first=make(setup.frozen_at_first) if until else ())
    faults = _arm(context, folder, computes, state, checkpoint)
    return Trainable(state=state, health=health, computes=computes, boundary=boundary,
                     checkpoint=checkpoint, faults=faults)


def _make_computes(
    context: Context, setup: Setup, boundary: StepBoundary, state: TrainState,
    frozen: FrozenAtFirst,
) -> tuple[ForwardBackward, ...]:
    """Collective. Wrap model and loss for each turn, whose gradients alone are reduced."""
    config, world, of_turn = context.config, context.world, dict[str, ForwardBackward]()
    turns, find_unused = turns_of(setup.optimizer), config.parallel.find_unused == "on"
    group = world.group if config.parallel.reduction == "ddp" else None
    # Unshared buffers are taken from the last rank.
    options = {"nonfinite": boundary.buffers.nonfinite} if world.rank == world.size - 1 else {}
    for turn in dict.fromkeys(turns):
        of = TurnParameters(setup.optimizer, turn, frozen)
        if not of.trained:
            raise ConfigError(f"--freeze-until {config.freeze_until}: until then --freeze leaves "
                              f"nothing to train{f' in the turn {turn!r}' if turn else ''}; freeze "
                              "less.")
        with of.alone():
            objective = ddp.Objective(
                setup.model, partial(setup.task.loss, turn=turn) if turn else setup.task.loss,
                num_ranks=world.size if group else 1, nominal_count=config.batch.global_size,
                device=world.device, changed=boundary.buffers.changed, **options)
            wrapped = ddp.wrap(objective, group=group, device=world.device,
                               bucket_mb=config.parallel.bucket_mb, find_unused=find_unused)
            reduction: Reduction = iter
            if setup.choice.mode and world.device.type == "cuda":
                reduction = partial(ddp.with_own_gradients, of.trained)
            if config.parallel.reduction == "canonical":
                reduction = RankInvariantReduction(
                    objective, of.trained, boundary.buffers, world, setup.plan,
                    optional=find_unused)
            of_turn[turn] = ForwardBackward(
                objective, wrapped, state, context.marks,
                precision.autocast(setup.choice, world.device), reduction=reduction, of=of)
    return tuple(of_turn[turn] for turn in turns)


def _arm(
    context: Context, folder: RunFolder, computes: Computes, state: TrainState,
    checkpoint: Checkpointer,
) -> fault_injection.FaultInjector:
    """Arm the faults to be injected, from the next progress mark on."""

    def nan() -> None:
        computes.of_step(state.progress.step + 1).objective.inject_nan()

    def flip() -> None:
        checkpoint.abandon()  # a save in flight may still read it
        parameter = next(p for p in state.model.parameters() if p.numel())
        memory = torch.empty(0, dtype=torch.uint8, device=parameter.device)
        memory.set_(parameter.untyped_storage())[0] ^= 1

    def corrupt() -> None:
        checkpoint.abandon()  # the newest one may still be in flight
        if not (saved := folder.store.checkpoints()):
            raise fault_injection.InjectedFault("--inject corrupt: there is no checkpoint yet")
        newest = saved[-1].path / layout.MODEL
        with open(files.open_regular(newest, os.O_RDWR), "r+b") as file:
            middle = os.fstat(file.fileno()).st_size // 2
            byte = os.pread(file.fileno(), 1, middle)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), middle)

    def no_space() -> None:
        raise fault_injection.no_space(folder.store.folder)

    injector = fault_injection.FaultInjector(
        folder.faults, rank=context.world.rank, attempt=folder.identity.attempt,
        fired=context.path / layout.FAULTS, log=context.log,
        actions={"nan": nan, "flip": flip, "corrupt": corrupt,
                 "enospc": no_space})
    if injector:
        context.marks.subscribe(injector)
    return injector


def _make_evaluator(
    context: Context, setup: Setup, trainable: Trainable, split: str
) -> Evaluator:
    """The evaluator of a split, of the averaged weights if there are some."""
    state, stop = trainable.state, context.stop
    return Evaluator(
        task=setup.task, dataset=setup.data[split], model=setup.model, config=context.config,
        world=context.world, autocast=trainable.compute.autocast, marks=context.marks,
        weights=state.evaluation_weights,
        step=lambda: state.progress.step,
        epoch=lambda: setup.plan.epoch_of(max(1, state.progress.step)),
        stopped=lambda: stop.requested, warn_once=context.log.warn_once,
        limit=0 if split == "test" else context.config.eval.batches)


def _open_recorders(
    context: Context, setup: Setup, folder: RunFolder, resumption: Resumption
) -> Recorders:
    """Describe the run in its folder and on the console, and open what records it."""
    config, found, summary = context.config, resumption.found, list[str]()
    rate_end = schedules.describe_end(config, setup.lengths, setup.intervals.total)
    if context.world.writes_run_dir:
        card = setup.card
        if config.init is not None and found is None:
            card = card | {"init": resumption.initial_weights}
        _write_description(context, folder, resumption, card)
        summary = summary_lines(config, card, context.world, context.path)
        warnings = startup_warnings(config, card, warmup=setup.steps(config.schedule.warmup),
                                    total=setup.intervals.total)
        warnings += [rate_end[1]] * bool(rate_end[1])
        log_startup(context.log, summary, warnings, resumption, context.path)
    open_metrics(context, setup, folder, found, summary=summary)
    pictures = None
    draw, write = (method_of(setup.task, name) for name in ("picture", "text"))
    if context.world.is_main and (draw or write):
        pictures = Pictures(draw=draw, write=write, folder=context.path / layout.PICTURES,
                            model=setup.model, show=folder.metrics.exhibit, log=context.log)
    return Recorders(metrics=folder.metrics, pictures=pictures,
                     rate_end=rate_end if context.world.is_main else (0, ""),
                     warn=context.log.warning,
                     timing=open_timing(context, setup, folder.identity.attempt))


def _write_description(
    context: Context, folder: RunFolder, resumption: Resumption, card: Mapping[str, Any]
) -> None:
    """Write configuration and environment into the run folder."""
    config, world, path = context.config, context.world, context.path
    has_secret = MASK in str(compatibility.settings(config))
    files.replace_text(path / layout.CONFIG, command_line.to_toml(config),
                       mode=0o600 if has_secret else 0o666)
    gpu = {key: value for key, value in resumption.circumstances.items() if key == "gpu"}
    files.replace_json(path / layout.ENVIRONMENT,
                       run_dir.environment(world, {**card, **gpu}, label=resumption.decision.label,
                                           why=resumption.decision.why))
