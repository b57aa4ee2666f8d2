"""Startup summary of a run: model, data, batch, device, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.errors import listed
from trainer.run.context import Resumption
from trainer.run.run_dir import device_name
from trainer.storage.files import display_path
from trainer.telemetry.events import Log


def summary_lines(
    config: Config[Any], card: Mapping[str, Any], world: World, path: Path
) -> list[str]:
    """The lines of the summary; `card` is that of the setup."""
    trained = card["parameters"] - card["frozen_weights"]
    until = f", --freeze-until {config.freeze_until}" * bool(config.freeze_until.value)
    frozen = (f", {trained:,} of them trained ({len(card['frozen_parameters'])} tensors frozen"
              f"{until})" if card["frozen_parameters"] else "")
    data = [f"{n:,} {split}" for split, n in card["samples"].items() if n is not None]
    data += [card["order"]] * (card["order"] != "permutation")
    data += [f"states {card['stream_states']}"] * bool(card["stream_states"])
    reason = f" ({world.threads_reason})" * bool(world.threads_reason)
    threads = f"{world.threads} thread{'s' * (world.threads > 1)} each{reason}"
    evaluating = card["in_evaluation"]
    return [
        f"model   {card['model']}, {card['parameters']:,} parameters{frozen}, {card['precision']}",
        *[f"modes   in evaluation mode, as model() left them: {listed(evaluating)}"] * bool(
            evaluating),
        f"data    {card['data']}: {', '.join(data)}",
        f"batch   {batch_line(config, world.size, card)}",
        f"device  {world.size} × {device_name(world.device)}, {threads}",
        f"look    tensorboard --logdir {display_path(path)}"]


def batch_line(config: Config[Any], ranks: int, card: Mapping[str, Any]) -> str:
    """Describe how a global batch is divided, and the number of samples of a batch norm."""
    batch, count = config.batch, config.batch.micro_batches
    each = (f", {count // ranks} or {count // ranks + 1} of them a rank" if count % ranks else
            f" × {count // ranks}")
    samples = batchnorm_samples(config, ranks, card)
    return (f"{ranks} rank{'s' * (ranks > 1)} × micro-batches of {batch.micro_size}{each} "
            f"(accumulated) = global batch of {batch.global_size}"
            + ("" if samples is None else f"; each BatchNorm sees {samples} samples"))


def batchnorm_samples(config: Config[Any], ranks: int, card: Mapping[str, Any]) -> int | None:
    """Number of samples in the statistics of a batch norm; None without batch norms."""
    samples = config.batch.micro_size * (ranks if card["synchronised_batch_norms"] else 1)
    return samples if card["batch_norms"] else None


def startup_warnings(
    config: Config[Any], card: Mapping[str, Any], *, warmup: int, total: int
) -> list[str]:
    """Warnings about the start; `warmup` and `total` are in steps."""
    warnings = [f"--init {config.init}: {line}" for line in card.get("init", ())]
    if names := card.get("untrained", ()):
        warnings.append(f"not trained: {listed(names)}: not in any group of the task's "
                        "parameter_groups(); add it to a group, or freeze it")
    if warmup > total:
        warnings.append(f"--schedule.warmup {config.schedule.warmup}: the run has {total} steps "
                        f"and the warm-up {warmup}, so the rate ends at {total / warmup:.0%} of "
                        "--optim.lr; shorten it, for example to 5%")
    return warnings


def log_startup(
    log: Log, lines: Sequence[str], warnings: Sequence[str], resumption: Resumption, path: Path
) -> None:
    """Log the warnings, whether the run is new or continues, and, at its first start and after a
    change, the summary."""
    decision, position = resumption.decision, resumption.position
    for line in lines if not log.attempt or decision.changes else ():
        log.info(line)
    for line in [*warnings, *(f"changed: {change}" for change in decision.changes)]:
        log.warning(line)
    for change in decision.changes:
        log.event("changed", what=change)
    how = "a fresh start"
    if resumption.found is not None:
        how = (f"continuing from step {position} ({decision.label}"
               + f": {decision.why}" * bool(decision.why) + ")"
               + f", restart {log.attempt}" * bool(log.attempt))
    log.info(f"run folder {display_path(path)}: {how}")
    log.event("restore" if resumption.found else "fresh", at_step=position, label=decision.label,
              why=decision.why)
