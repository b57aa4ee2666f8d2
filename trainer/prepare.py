"""Config + World → data, model, optimizer and lengths, checked, before anything is written."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer import optim, precision, rng, sync_batchnorm
from trainer.config import Config
from trainer.data import batch as batches
from trainer.data.loader import KeyedSamples
from trainer.data.sampler import Plan
from trainer.errors import ConfigError
from trainer.world import World


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Lengths of the configuration in optimizer steps; 0 is off."""

    total: int
    evaluate: int
    checkpoint: int
    log: int


@dataclass(frozen=True, kw_only=True)
class Work:
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


def prepare(config: Config[Any], world: World) -> Work:
    """Everything that can be made, and found wrong, before the run folder is touched.

    Raises:
        ConfigError: the configuration doesn't fit the data, the model or the ranks.
    """
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
    return Work(task=task, model=model, choice=choice, optimizer=optimizer, data=data, plan=plan,
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


def bind_seed(task: Any, seed: int) -> Any:
    """The task with the run's seed in its field `seed`, where it has one that is None."""
    names = {f.name for f in dataclasses.fields(task)}
    return dataclasses.replace(task, seed=seed) if "seed" in names and task.seed is None else task
