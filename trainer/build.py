"""Config + World → the parts of a run: the only place that constructs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import (
    cli, faults, folder, optim, parallel, precision, resume, rng, schedules, sync_batchnorm,
)  # fmt: skip
from trainer.checkpoint import Checkpointer, Found
from trainer.config import Config
from trainer.data import batch as batches
from trainer.data.loader import KeyedSamples, Loader, in_memory
from trainer.data.sampler import MicroBatchSampler, Plan
from trainer.errors import ConfigError
from trainer.evaluate import Evaluator
from trainer.folder import Identity
from trainer.lock import RunLock
from trainer.log import Log
from trainer.metrics import Metrics, open_metrics
from trainer.state import Best, Horizon, LossMeter, Progress, TrainState
from trainer.step import Step
from trainer.stop import StopRequest
from trainer.store import Store
from trainer.world import World


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Lengths of the configuration in optimizer steps; 0 is off."""

    total: int
    evaluate: int
    checkpoint: int
    log: int


@dataclass(kw_only=True)
class Parts:
    """Everything that the loop works with."""

    config: Config[Any]
    path: Path
    identity: Identity
    world: World
    log: Log
    stop: StopRequest
    faults: faults.Faults
    state: TrainState
    step: Step
    loader: Loader
    validate: Evaluator | None
    test: Evaluator | None
    checkpoint: Checkpointer
    metrics: Metrics
    intervals: Intervals
    found: Found | None
    card: dict[str, Any] = field(default_factory=dict)
    """What the run consists of, for people."""

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        return self.state.progress

    def wishes(self) -> tuple[bool, bool, bool]:
        """What this rank wants to happen after the step: stop, save, fail."""
        return self.stop.requested, self.checkpoint.overdue, self.checkpoint.must_fail

    def close(self) -> None:
        """End loader processes, the last save, the files."""
        self.loader.close()
        self.checkpoint.close()
        self.metrics.close()


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What the configuration and the data come to, before the run folder is touched."""

    task: Any
    model: nn.Module
    choice: precision.Choice
    optimizer: torch.optim.Optimizer
    data: dict[str, Any]
    plan: Plan
    intervals: Intervals
    fingerprint: str
    card: dict[str, Any]


def build(config: Config[Any], world: World, log: Log, stop: StopRequest) -> Parts:
    """Collective. Construct the run, on every rank the same.

    Raises:
        ConfigError: the configuration doesn't fit the data, the model, the ranks or the run that
            is resumed, on any rank: all raise, before anything is changed.
        CheckpointDamaged: there are checkpoints and none is whole.
    """
    log.phase = "build"
    path = Path(config.run or f"runs/{cli.DEFAULT_RECIPE}")
    work = _agreed(world, partial(_prepare, config, world))
    identity = folder.look(path, world, resume=config.resume)
    lock = RunLock(path / folder.LOCK, world.nonce)
    armed = faults.Faults(
        [faults.parse(text) for text in config.inject], rank=world.rank,
        attempt=identity.attempt, marks=path / folder.FAULTS, log=log,
    )  # fmt: skip

    horizon = Horizon(epoch=work.plan.steps_per_epoch, total=work.intervals.total)
    state = TrainState(
        model=work.model,
        optimizer=work.optimizer,
        schedule=schedules.build(config.schedule, work.optimizer, horizon),
        scaler=precision.scaler(work.choice, world.device, config.precision.loss_scale),
        progress=Progress(),
        best=Best(),
        meter=LossMeter(),
        seed=config.seed,
        num_ranks=world.size,
        parts={"horizon": horizon},
    )
    metrics = Metrics()
    circumstances = {
        "task": cli.task_path(config.task), "data": work.fingerprint, "world_size": world.size,
        "threads": world.threads, "device": folder.device_name(world.device),
        "torch": torch.__version__,
    }  # fmt: skip
    keep_every = config.checkpoint.keep_every.steps(epoch=horizon.epoch, total=horizon.total)
    checkpoint = Checkpointer(
        store=Store(
            path / folder.CHECKPOINTS, run=identity.run, keep=config.checkpoint.keep,
            keep_every=keep_every or None, guard=lock.committing,
            fault=lambda point: armed.at(point, step=state.progress.step),
        ),
        state=state, world=world, log=log, run_id=identity.run, recent=metrics.recent,
        describe={"settings": resume.settings(config), "circumstances": circumstances},
        on_error=config.checkpoint.on_error, every_s=config.checkpoint.every_s,
    )  # fmt: skip
    found = _find(config, checkpoint, world, log)
    verdict = resume.Verdict()
    if found is not None:
        verdict = resume.judge(config, found.facts["settings"], now=circumstances,
                               then=found.facts["circumstances"])
        state.progress.load_state_dict(found.facts["progress"])
    position = log.step = state.progress.step
    folder.refuse_finished(path, world, position, work.intervals.total)
    folder.enter(path, identity, lock, world, log)
    log.event("start", world_size=world.size)
    armed.at("start", step=position)

    wrapped, objective = _wrap(config, work, world)
    step = Step(
        objective=objective, wrapped=wrapped, model=work.model, optimizer=work.optimizer,
        schedule=state.schedule, scaler=state.scaler,
        autocast=partial(precision.autocast, work.choice, world.device), clip=config.clip,
        progress=state.progress, seed=config.seed, num_ranks=world.size,
        nominal_count=config.batch.global_size, faults=armed, broadcast=world.broadcast,
    )  # fmt: skip
    collate = getattr(work.task, "collate", batches.collate)
    workers = _workers(config, work.data["train"], world)
    loader = Loader(
        KeyedSamples(work.data["train"], seed=config.seed, collate=collate),
        MicroBatchSampler(
            work.plan, rank=world.rank, num_ranks=world.size, seed=config.seed,
            shuffle=config.data.shuffle == "on", position=position,
            total_steps=work.intervals.total,
        ),
        workers=workers, prefetch=config.data.prefetch, device=world.device,
        faults=armed,
    )  # fmt: skip
    evaluators = {
        split: None if work.data[split] is None else Evaluator(
            model=work.model, loss=work.task.loss, dataset=work.data[split], collate=collate,
            batch_size=_evaluation_batch(config), workers=workers, seed=config.seed,
            rank=world.rank, num_ranks=world.size, device=world.device, autocast=step.autocast,
            all_sum=world.all_sum, faults=armed, step=lambda: state.progress.step,
        )
        for split in ("validation", "test")
    }  # fmt: skip
    card = work.card | {
        "workers": workers, "precision": str(work.choice), "fingerprint": work.fingerprint,
    }  # fmt: skip
    if world.is_main:
        folder.replace_text(path / folder.CONFIG, cli.to_toml(config))
        label, why = _determinism(config, world, verdict)
        folder.replace_json(path / folder.ENVIRONMENT,
                            folder.environment(world, card, label=label, why=why))
        checkpoint.store.clean()
        open_metrics(
            metrics, path, log, resumed=None if found is None else found.facts, step=position,
            every=work.intervals.log, total=work.intervals.total,
            images=_preview(work.task, position),
        )  # fmt: skip
        _announce(log, config, card, found, verdict, path)
    return Parts(
        config=config, path=path, identity=identity, world=world, log=log, stop=stop,
        faults=armed, state=state, step=step, loader=loader, validate=evaluators["validation"],
        test=evaluators["test"], checkpoint=checkpoint, metrics=metrics,
        intervals=work.intervals, found=found, card=card,
    )  # fmt: skip


def bind_seed(task: Any, seed: int) -> Any:
    """The task with the run's seed in its field `seed`, where it has one that is None."""
    names = {f.name for f in dataclasses.fields(task)}
    return dataclasses.replace(task, seed=seed) if "seed" in names and task.seed is None else task


def _agreed(world: World, make: Callable[[], Any]) -> Any:
    """Collective. What `make` returns; an error of one rank becomes one of all."""
    made, error = None, None
    try:
        made = make()
    except Exception as problem:
        error = problem
    world.agree(error)
    return made


def _prepare(config: Config[Any], world: World) -> _Work:
    precision.set_determinism(config.numerics.deterministic == "on", world.device)
    task = bind_seed(config.task, config.seed)
    data = {}
    for split in ("train", "validation", "test"):
        rng.key_generators(config.seed, rng.DATA)
        data[split] = task.dataset(split)
        if split != "train" and data[split] is not None and not len(data[split]):
            data[split] = None
    plan, intervals = _plan(config, data["train"], world)
    rng.key_generators(config.seed, rng.MODEL)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--task: model() returned {type(model).__name__}, not a nn.Module.")
    model.train()
    choice = precision.choose(config.precision, model, world.device)
    layout = torch.channels_last if choice.channels_last else torch.preserve_format
    model = model.to(world.device, memory_format=layout)  # type: ignore[call-overload]
    synced = 0
    if config.parallel.sync_bn == "auto":
        model, synced = sync_batchnorm.convert(model, world.size, world.device.type, world.group)
    sync_batchnorm.guard_plain(model)
    optimizer = optim.build(config.optim, model, getattr(task, "parameter_groups", None))
    card = {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "samples": {split: None if d is None else len(d) for split, d in data.items()},
        "data": str(getattr(task, "source", config.task)),
        "ranks": f"{world.size} rank" + "s" * (world.size > 1),
        "synchronised_batch_norms": synced,
    }
    return _Work(task=task, model=model, choice=choice, optimizer=optimizer, data=data, plan=plan,
                 intervals=intervals, fingerprint=_fingerprint(task, data["train"], config.seed),
                 card=card)


def _plan(config: Config[Any], train: Any, world: World) -> tuple[Plan, Intervals]:
    if train is None:
        raise ConfigError('--task: dataset("train") returned None; a run needs training samples.')
    batch, samples = config.batch, len(train)
    if world.size > batch.micro_batches:
        raise ConfigError(
            f"--nproc_per_node: {world.size} ranks, but --batch.global-size {batch.global_size} "
            f"is only {batch.micro_batches} micro-batches of --batch.micro-size "
            f"{batch.micro_size}: use at most {batch.micro_batches} ranks, or a micro-size of "
            f"{max(1, batch.global_size // world.size)} or less.")
    plan = Plan(samples=samples, global_size=batch.global_size, micro_size=batch.micro_size,
                drop_last=config.data.drop_last == "on")
    if plan.steps_per_epoch == 0:
        remedy = ("--task: dataset(\"train\") is empty." if samples == 0 else
                  f"--batch.global-size {batch.global_size}: the training data have only {samples} "
                  "samples and --data.drop-last is on, so there is no whole global batch and no "
                  f"optimizer step; use a global size of {samples} or less, or --data.drop-last "
                  "off.")
        raise ConfigError(remedy)
    epoch = plan.steps_per_epoch
    total = config.total_steps(epoch)
    return plan, Intervals(
        total=total,
        evaluate=config.eval.every.steps(epoch=epoch, total=total),
        checkpoint=config.checkpoint.every.steps(epoch=epoch, total=total),
        log=config.log.every.steps(epoch=epoch, total=total),
    )


def _wrap(
    config: Config[Any], work: _Work, world: World
) -> tuple[nn.Module, parallel.Objective]:
    if work.choice.compile:
        work.model.compile()  # in place: the names in the state dict stay plain
    objective = parallel.Objective(
        work.model, work.task.loss, num_ranks=world.size,
        nominal_count=config.batch.global_size, device=world.device,
    )  # fmt: skip
    wrapped = parallel.wrap(objective, group=world.group, device=world.device,
                            bucket_mb=config.parallel.bucket_mb)
    return wrapped, objective


def _find(
    config: Config[Any], checkpoint: Checkpointer, world: World, log: Log
) -> Found | None:
    # After a restart the newest of this run wins over the PATH on the command line.
    found = checkpoint.find()
    if found is None and config.resume not in ("auto", "never"):
        found = checkpoint.find_at(Path(config.resume))
    if found is not None:
        for why in found.skipped:
            log.warning(f"checkpoint skipped: {why}")
            log.event("checkpoint-skipped", why=why)
    return found


def _workers(config: Config[Any], dataset: Any, world: World) -> int:
    if config.data.workers != "auto":
        return config.data.workers
    return 0 if in_memory(dataset) else min(2, max(1, world.threads - 1))


def _evaluation_batch(config: Config[Any]) -> int:
    size = config.eval.batch_size
    return 2 * config.batch.micro_size if size == "auto" else size


def _fingerprint(task: Any, dataset: Any, seed: int) -> str:
    """What tells one data set from another: the task's word, or length and 16 keyed samples."""
    if hasattr(task, "fingerprint"):
        return str(task.fingerprint())
    count = len(dataset)
    digest = hashlib.blake2b(digest_size=8)
    reader = KeyedSamples(dataset, seed=seed, augment=False)
    for place in range(min(16, count)):
        index = rng.mix(rng.DATA, place) % count
        sample = reader.sample(index)
        for tensor in batches.tensors(batches.collate([sample])):
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return f"{count} samples {digest.hexdigest()}"


def _preview(task: Any, position: int) -> Any:
    return task.preview(32) if position == 0 and hasattr(task, "preview") else None


def _determinism(
    config: Config[Any], world: World, verdict: resume.Verdict
) -> tuple[str, str]:
    if config.numerics.deterministic == "off" and world.device.type != "cpu":
        return "equivalent", "--numerics.deterministic is off"
    if world.device.type == "mps":
        return "equivalent", "mps has no deterministic kernels"
    return verdict.label, verdict.why


def _announce(
    log: Log, config: Config[Any], card: dict[str, Any], found: Found | None,
    verdict: resume.Verdict, path: Path,
) -> None:  # fmt: skip
    batch, samples = config.batch, card["samples"]
    log.info(f"{card['model']}: {card['parameters']:,} parameters, {card['precision']}")
    log.info(f"data: {card['data']}: " + ", ".join(
        f"{n:,} {split}" for split, n in samples.items() if n is not None))
    log.info(f"global batch {batch.global_size} = {batch.micro_batches} micro-batches of "
             f"{batch.micro_size}, over {card['ranks']}")
    for change in verdict.changes:
        log.warning(f"changed: {change}")
        log.event("changed", what=change)
    if found is None:
        log.info(f"run folder {path}: a fresh start")
    else:
        log.info(f"run folder {path}: continuing from step {found.step} ({verdict.label}"
                 + (f": {verdict.why}" if verdict.why else "") + ")")
    log.event("restore" if found else "fresh", at_step=found.step if found else 0,
              label=verdict.label, why=verdict.why)
