"""Config + World → data, model, optimizer and lengths, checked, before anything is written."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer import optim, precision, rng, sync_batchnorm
from trainer.config import Config
from trainer.data import batch as batches
from trainer.data.feed import first_samples, known_length
from trainer.data.loader import KeyedSamples
from trainer.data.sampler import Plan
from trainer.errors import ConfigError
from trainer.length import Length
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
        if split != "train" and data[split] is not None and known_length(data[split]) == 0:
            data[split] = None
    plan, intervals = _plan(config, data, world)
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
        "samples": {split: None if d is None else known_length(d) for split, d in data.items()},
        "data": str(getattr(task, "source", config.task)),
        "ranks": f"{world.size} rank" + "s" * (world.size > 1),
        "synchronised_batch_norms": synced,
    }
    return Work(task=task, model=model, choice=choice, optimizer=optimizer, data=data, plan=plan,
                 intervals=intervals, fingerprint=_fingerprint(task, data["train"], config),
                 card=card)


def _plan(
    config: Config[Any], data: dict[str, Any], world: World
) -> tuple[Plan, Intervals]:
    if data["train"] is None:
        raise ConfigError('--task: dataset("train") returned None; a run needs training samples.')
    batch, samples = config.batch, known_length(data["train"])
    if world.size > batch.micro_batches:
        raise ConfigError(
            f"--nproc_per_node: {world.size} ranks, but --batch.global-size {batch.global_size} "
            f"is only {batch.micro_batches} micro-batches of --batch.micro-size "
            f"{batch.micro_size}: use at most {batch.micro_batches} ranks, or a micro-size of "
            f"{max(1, batch.global_size // world.size)} or less.")
    if samples is None:
        # Where an epoch ends is seen when it does: the plan has one that lasts for the whole run.
        samples = _steps_of_unknown(config, data) * batch.global_size
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


def _steps_of_unknown(config: Config[Any], data: dict[str, Any]) -> int:
    """Length of a run on a stream that doesn't know its own."""
    what = "the training stream has no length (no __len__)"
    if config.steps is None:
        raise ConfigError(f"--steps: {what}, so a run can't be measured in epochs; say how long "
                          "it is to be with --steps N.")
    for name, value, _ in config.leaves():
        unused = name == "eval.every" and data["validation"] is None
        if isinstance(value, Length) and value.unit == "epochs" and not unused:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {value}: {what}, so nothing can be measured in epochs; "
                              f"write steps or a part of the run, such as {flag} 10%.")
    return config.steps


def _fingerprint(task: Any, dataset: Any, config: Config[Any]) -> str:
    """What tells one data set from another: the task's word, or length and 16 keyed samples (the
    first ones of a stream)."""
    if hasattr(task, "fingerprint"):
        return str(task.fingerprint())
    count = known_length(dataset)
    if isinstance(dataset, IterableDataset):
        rng.key_generators(config.seed, rng.DATA)
        fresh = task.dataset("train")  # reading may move a stream that is to be trained on
        samples = first_samples(fresh, lanes=config.batch.micro_batches, count=16,
                                seed=config.seed)
    else:
        assert count is not None, "only a stream may not know its length"
        reader = KeyedSamples(dataset, seed=config.seed, augment=False)
        samples = [reader.sample(rng.mix(rng.DATA, place) % count)
                   for place in range(min(16, count))]
    digest = hashlib.blake2b(digest_size=8)
    for sample in samples:
        for tensor in batches.tensors(batches.collate([sample])):
            digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return f"{'a stream' if count is None else f'{count} samples'} {digest.hexdigest()}"


def bind_seed(task: Any, seed: int) -> Any:
    """The task with the run's seed in its field `seed`, where it has one that is None."""
    names = {f.name for f in dataclasses.fields(task)}
    return dataclasses.replace(task, seed=seed) if "seed" in names and task.seed is None else task
