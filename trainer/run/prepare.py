"""Setup of a run: data, model, optimizer and lengths, all checked, before its folder is touched."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.progress import ScheduleLengths
from trainer.config.fields import Duration
from trainer.config.schema import Config
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, Limited, in_memory
from trainer.data.order import Order, UserOrder, make_order
from trainer.data.sampler import BatchPlan
from trainer.data.stream_reader import StreamSpec, first_samples, known_length
from trainer.distributed import sync_batchnorm, torch_private
from trainer.distributed.device import OMP, share_of_cores
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.optim import activation_checkpointing, optimizers, precision, schedules
from trainer.optim.named_optimizers import optimizer_of
from trainer.run.metric_states import MetricStates
from trainer.run.model_modes import in_evaluation, set_training
from trainer.run.proof import check_state_dict, content
from trainer.storage.secrets import mask
from trainer.task import check_signatures, load_object, method_of, splits_of, task_figures
from trainer.telemetry import wandb

REMEDY = "correct it, or replace such samples by others: --data.on-error skip"
EVALUATION_REMEDY = ("correct it, or exclude it in dataset(): --data.on-error skip is for training "
                     "samples only, since scores over other samples are not comparable")
SMALL_STEP = 1 << 18
"""Products of a weight and a sample in a forward, below which `--world.threads auto` is 1."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals of the configuration in optimizer steps; 0 is off."""

    total: int
    evaluate: int
    checkpoint: int
    log: int
    verify: int


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether periodic work is due at a step: at the last one, and at every `interval` (0: off)."""
    return step > 0 and (step >= last or (interval > 0 and step % interval == 0))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run trains, before its folder is touched."""

    task: Any
    model: nn.Module
    choice: precision.PrecisionPolicy
    optimizer: torch.optim.Optimizer
    frozen_at_first: optimizers.FrozenAtFirst
    """What is frozen until --freeze-until."""
    schedule: Any
    lengths: ScheduleLengths
    """Lengths on which the schedule is based; a checkpoint restores those of the first start."""
    data: dict[str, Any]
    workers: int
    """Loader processes for the training data."""
    plan: BatchPlan
    order: Order
    intervals: Intervals
    fingerprints: dict[str, str | None]
    """Split → what identifies its data; None without data."""
    sinks: dict[str, Any]
    """Factories of the user's sinks, by name."""
    card: dict[str, Any]
    """Facts about the run for the startup summary."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Makes a batch of samples."""
        return method_of(self.task, "collate") or batches.collate

    def stream_spec(self, config: Config[Any]) -> StreamSpec | None:
        """How the training data are read, if they are a stream."""
        if not isinstance(self.data["train"], IterableDataset):
            return None
        return StreamSpec(
            dataset=self.data["train"], seed=config.seed, collate=self.collate,
            lanes=config.batch.micro_batches, micro_size=config.batch.micro_size,
            read_through=config.data.stream_resume == "read-through", limit=config.data.limit)

    def steps(self, duration: Duration | str) -> int:
        """A duration in optimizer steps; 0 for a word in its place."""
        return 0 if isinstance(duration, str) else duration.steps(
            epoch=self.plan.steps_per_epoch, total=self.intervals.total)


def prepare(config: Config[Any], world: World) -> Setup:
    """Build and check everything that does not need the run folder."""
    precision.set_tf32(config.numerics.tf32 == "on")
    wandb.check_installed(config.log.wandb)
    canonical = config.parallel.reduction == "canonical"
    chooses_threads = config.world.threads == "auto" and world.threads_reason != OMP
    if chooses_threads and canonical:
        world.use_threads(1, "--parallel.reduction canonical")
    task = bind_seed(config.task, config.seed)
    check_signatures(task)
    task_figures(task)  # raises if they can't be used
    MetricStates(task, world.device)
    data = {split: make_data(task, config, split)
            if config.overfit is None or split == "train" else None for split in splits_of(task)}
    if config.data.on_error == "skip" and isinstance(data["train"], IterableDataset):
        raise ConfigError("--data.on-error skip: the training data are a stream, whose iterator "
                          "ends when it raises; skip bad samples in its __iter__ or lane().")
    sinks = {path: load_object(path, "--log.sinks") for path in config.log.sinks}
    order = make_order(config.data, data["train"], config.seed, task=task,
                       micro_size=config.batch.micro_size)
    plan, intervals = _plan(config, data, world, order)
    model, choice = make_model(task, config, world.device)
    if chooses_threads and _is_small(model, config.batch.micro_size):
        world.use_threads(1, "a small model")
    evaluating = in_evaluation(model)
    synced = _synchronise_batch_norms(model, config, world)
    frozen, at_first = _freeze(config, model, plan, intervals)
    recomputed = activation_checkpointing.recompute(model, config.precision.recompute_every)
    optimizer = optimizer_of(config.optim, model, task)
    lengths = ScheduleLengths(epoch=plan.steps_per_epoch, total=intervals.total,
                              replan=config.schedule.replan == "on")
    schedule = schedules.make_schedule(config.schedule, optimizer, lengths)
    if schedule.metric:
        _check_plateau(config, data)
    workers = loader_workers(config, data["train"], world)
    fingerprints = fingerprints_of(task, data, config, order, rank=world.rank)
    card = {
        **_describe(model),
        "samples": {split: None if d is None else known_length(d) for split, d in data.items()},
        "data": mask(str(getattr(task, "source", _short_repr(config.task)))),
        "ranks": f"{world.size} rank" + "s" * (world.size > 1) + (
            ", summed by their numbers; batch norms see one at a time" if canonical else ""),
        "synchronised_batch_norms": synced,
        "frozen_parameters": frozen,
        "in_evaluation": evaluating,
        "untrained": optimizers.untrained(optimizer, model),
        "recomputed_blocks": recomputed,
        "order": "a stream" if plan.in_lanes else order.name,
        "workers": workers,
        "class_names": list(getattr(task, "class_names", ())),
        "precision": str(choice),
        "fingerprint": fingerprints["train"],
        "stream_states": "",
    }
    return Setup(task=task, model=model, choice=choice, optimizer=optimizer, schedule=schedule,
                 frozen_at_first=at_first, lengths=lengths, data=data, plan=plan, order=order,
                 intervals=intervals, card=card, sinks=sinks, workers=workers,
                 fingerprints=fingerprints)


def _short_repr(task: Any) -> str:
    """The task's representation, without the fields that have their defaults."""
    plain = {f.name: f.default_factory() if callable(f.default_factory) else f.default
             for f in dataclasses.fields(task)}
    given = [f"{name}={getattr(task, name)!r}" for name, default in plain.items()
             if repr(getattr(task, name)) != repr(default)]
    return f"{type(task).__qualname__}({', '.join(given)})"


def _freeze(
    config: Config[Any], model: nn.Module, plan: BatchPlan, intervals: Intervals
) -> tuple[list[str], optimizers.FrozenAtFirst]:
    """Freeze parameters; return their names, and what is only frozen until --freeze-until."""
    if not config.freeze_until.value:
        return optimizers.freeze(model, config.freeze), optimizers.FrozenAtFirst()
    total = intervals.total
    if (until := config.freeze_until.steps(epoch=plan.steps_per_epoch, total=total)) >= total:
        raise ConfigError(f"--freeze-until {config.freeze_until}: that is step {until}, and the "
                          f"run ends with step {total}; omit the flag to keep the parameters "
                          "frozen, or give a shorter length.")
    return optimizers.freeze_at_first(model, config.freeze)


def _check_plateau(config: Config[Any], data: Mapping[str, Any]) -> None:
    if not validation_splits(data):
        raise ConfigError("--schedule.name plateau: the task has no validation data.")
    if config.eval.every_s:
        raise ConfigError(f"--eval.every-s {config.eval.every_s}: the rates of --schedule.name "
                          "plateau would depend on the time; use --eval.every.")


def _synchronise_batch_norms(model: nn.Module, config: Config[Any], world: World) -> int:
    """Synchronise the batch norms where the run asks for it; return their number."""
    if config.parallel.reduction == "canonical":
        sync_batchnorm.refuse(model)
        return 0
    return sync_batchnorm.convert(model, world.size, world.device.type, world.group,
                                  plain=config.parallel.sync_bn != "off")


def _describe(model: nn.Module) -> dict[str, Any]:
    """The part of the card that is about the model."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {"model": type(model).__name__, "parameters": sum(size for size, _ in sizes),
            "frozen_weights": sum(size for size, is_trained in sizes if not is_trained),
            "batch_norms": sum(isinstance(m, torch_private.BatchNorm) and m.training
                               for m in model.modules())}


def validation_splits(data: Mapping[str, Any]) -> list[str]:
    """The validation sets of the run: the main one, whose metrics are `val_NAME`, first."""
    return [split for split, dataset in data.items()
            if split.partition(":")[0] == "validation" and dataset is not None]


def make_data(task: Any, config: Config[Any], split: str) -> Any:
    """Build the data set of a split, of the training data the first `--data.limit` samples; None
    if the task returns None or a data set of length 0."""
    rng.seed_all(config.seed, rng.DATA)
    data = task.dataset(split)
    if not (data is None or isinstance(data, IterableDataset)
            or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))):
        raise ConfigError(f'--task: dataset("{split}") returned a {type(data).__name__}; return a '
                          "Dataset (__getitem__ and __len__), an IterableDataset, or None. The "
                          "trainer makes batches, workers and order; collate() is a method of the "
                          "task.")
    if split != "train":
        return None if data is not None and known_length(data) == 0 else data
    limit = config.data.limit
    if limit is None or data is None or isinstance(data, IterableDataset) or len(data) <= limit:
        return data
    return Limited(data, range(limit))


def make_model(
    task: Any, config: Config[Any], device: torch.device
) -> tuple[nn.Module, precision.PrecisionPolicy]:
    """Build the model in training mode, on its device, in its memory format."""
    rng.seed_all(config.seed, rng.MODEL)
    model = task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--task: model() returned {type(model).__name__}, not an nn.Module.")
    model = precision.unwrap(model)
    check_state_dict(model)
    set_training(model)
    choice = precision.resolve(config.precision, model, device,
                               eager=config.numerics.anomaly == "on")
    return precision.place(model, choice, device), choice


def _plan(
    config: Config[Any], data: dict[str, Any], world: World, order: Order
) -> tuple[BatchPlan, Intervals]:
    if data["train"] is None:
        raise ConfigError('--task: dataset("train") returned None; a run needs training data.')
    batch = config.batch
    samples = len(order) if isinstance(order, UserOrder) else known_length(data["train"])
    if samples is not None and isinstance(data["train"], IterableDataset):
        samples = min(samples, config.data.limit or samples)
    if world.size > batch.micro_batches:
        size, most = batch.global_size, max(1, batch.global_size // world.size)
        fits = next(n for n in range(most, 0, -1) if size % n == 0)
        raise ConfigError(
            f"--nproc_per_node: {world.size} ranks, but --batch.global-size {size} is only "
            f"{batch.micro_batches} micro-batches of --batch.micro-size {batch.micro_size}: use at "
            f"most {batch.micro_batches} ranks, or a micro-size of {fits} or less.")
    if samples is None:
        # The end of an epoch is unknown until it is reached: plan one epoch for the whole run.
        samples = _steps_of_unknown(config, data) * batch.global_size
    plan = BatchPlan(samples=samples, global_size=batch.global_size, micro_size=batch.micro_size,
                     drop_last=config.data.drop_last == "on",
                     in_lanes=isinstance(data["train"], IterableDataset))
    if plan.steps_per_epoch == 0:
        raise ConfigError(
            '--task: dataset("train") is empty.' if samples == 0 else
            f"--batch.global-size {batch.global_size}: the training data have only {samples} "
            f"samples; use a global size of {samples} or less, or --data.drop-last off.")
    return plan, make_intervals(config, plan)


def make_intervals(config: Config[Any], plan: BatchPlan) -> Intervals:
    """The intervals of a run whose data are divided by a plan."""
    epoch = plan.steps_per_epoch
    total = config.steps if config.steps is not None else plan.steps_of(config.epochs or 5)
    return Intervals(
        total=total, evaluate=config.eval.every.steps(epoch=epoch, total=total),
        checkpoint=config.checkpoint.every.steps(epoch=epoch, total=total),
        log=config.log.every.steps(epoch=epoch, total=total),
        verify=config.parallel.verify_every.steps(epoch=epoch, total=total))


def _steps_of_unknown(config: Config[Any], data: dict[str, Any]) -> int:
    """Steps of a run on a stream without a length."""
    what = "the training stream has no length (no __len__)"
    if config.steps is None:
        raise ConfigError(f"--steps: {what}, so set the number of steps with --steps N.")
    for name, value, _ in config.leaves():
        unused = name == "eval.every" and not validation_splits(data)
        if isinstance(value, Duration) and value.unit == "epochs" and not unused:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value}: {what}, so nothing can be measured in epochs; "
                              f"use steps or a fraction of the run, such as {flag} 10%.")
    return config.steps


def _is_small(model: nn.Module, samples: int) -> bool:
    """Whether a forward is over before a second thread has begun. A convolution uses its weights,
    which have more than two dimensions, many times."""
    parameters = [*model.parameters()]
    return (sum(p.numel() for p in parameters) * samples < SMALL_STEP
            and all(p.dim() <= 2 for p in parameters))


def fingerprints_of(
    task: Any, data: Mapping[str, Any], config: Config[Any], order: Order, *, rank: int = 0
) -> dict[str, str | None]:
    """What identifies the data of each split; None without data."""
    found = {split: _fingerprint(task, split, dataset, config, rank)
             for split, dataset in data.items()}
    if "train" in found:
        found["train"] = ", ".join(filter(None, (found["train"], order.facts)))
    return found


def _fingerprint(
    task: Any, split: str, dataset: Any, config: Config[Any], rank: int
) -> str | None:
    """Length and hash of 16 keyed samples, in a stream the first; of the training data the task's
    `fingerprint()`, if it has one."""
    if split == "train" and (call := method_of(task, "fingerprint")):
        return str(call())
    if dataset is None:
        return None
    count = known_length(dataset)
    if isinstance(dataset, IterableDataset):
        rng.seed_all(config.seed, rng.DATA)
        fresh = task.dataset(split)  # reading may advance the stream used later
        contents = [content(sample) for sample in first_samples(
            fresh, lanes=config.batch.micro_batches, count=16, seed=config.seed)]
    else:
        assert count is not None, "only a stream may have no length"
        trains = split == "train"
        reader = KeyedSamples(dataset, seed=config.seed, augment=False, rank=rank,
                              skip=trains and config.data.on_error == "skip",
                              advice=REMEDY if trains else EVALUATION_REMEDY)
        contents = [content(reader.sample(index)) for index in fingerprinted(count)]
    digest = hashlib.blake2b(digest_size=8)
    for sample in contents:
        digest.update(sample)
    return f"{'a stream' if count is None else f'{count} samples'} {digest.hexdigest()}"


def fingerprinted(count: int) -> list[int]:
    """The samples, of `count`, that a fingerprint reads."""
    return [rng.mix(rng.DATA, place) % count for place in range(min(16, count))]


def loader_workers(config: Config[Any], dataset: Any, world: World) -> int:
    """Number of loader processes; auto: 0 for data in memory and in a daemonic process."""
    if config.data.workers != "auto":
        return config.data.workers
    none = in_memory(dataset) or torch.multiprocessing.current_process().daemon
    return 0 if none else min(2, max(1, share_of_cores(world.local_size) - 1))


def bind_seed(task: Any, seed: int) -> Any:
    """Set the task's field `seed` to the run's seed, if it has such a field and it is None."""
    names = {f.name for f in dataclasses.fields(task)}
    return dataclasses.replace(task, seed=seed) if "seed" in names and task.seed is None else task
