"""The card of a run: what it consists of, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import resume
from trainer.config import Config
from trainer.diagnosis import near
from trainer.folder import device_name
from trainer.log import Log
from trainer.source import Found
from trainer.world import World


def card_lines(config: Config[Any], card: Mapping[str, Any], world: World, path: Path) -> list[str]:
    """Model, data, batch, device, and where to look.

    Args:
        card: what was made (`Work.card`, and precision).
    """
    trained = card["parameters"] - card["frozen_weights"]
    frozen = (f", {trained:,} of them trained ({len(card['frozen_parameters'])} tensors frozen)"
              if card["frozen_parameters"] else "")
    threads = f"{world.threads} thread" + "s" * (world.threads > 1)
    samples = ", ".join(f"{n:,} {split}" for split, n in card["samples"].items() if n is not None)
    rows = {
        "model": f"{card['model']}, {card['parameters']:,} parameters{frozen}, {card['precision']}",
        "data": f"{card['data']}: {samples}",
        "batch": batch_line(config, world.size, card),
        "device": f"{world.size} × {device_name(world.device)}, {threads} each",
        "look": f"tensorboard --logdir {near(path)}",
    }
    return [f"{name:<7} {text}" for name, text in rows.items()]


def batch_line(config: Config[Any], ranks: int, card: Mapping[str, Any]) -> str:
    """How a global batch comes about, and what a batch norm sees of it."""
    batch, count = config.batch, config.batch.micro_batches
    each = f"{ranks} rank{'s' * (ranks > 1)} × micro-batches of {batch.micro_size}"
    if count % ranks:
        steps = f"{count // ranks} or {count // ranks + 1} of them a rank"
        text = f"{each}, {steps} (accumulated) = global batch of {batch.global_size}"
    else:
        text = f"{each} × {count // ranks} (accumulated) = global batch of {batch.global_size}"
    seen = batchnorm_samples(config, ranks, card)
    return text if seen is None else f"{text}; each BatchNorm sees {seen} samples"


def batchnorm_samples(config: Config[Any], ranks: int, card: Mapping[str, Any]) -> int | None:
    """Samples over which a batch norm that trains takes its statistics; None if there is none."""
    if not card["batch_norms"]:
        return None
    return config.batch.micro_size * (ranks if card["synchronised_batch_norms"] else 1)


def doubts(
    config: Config[Any], card: Mapping[str, Any], *, epoch: int, total: int
) -> list[str]:
    """What is said of a start: what doesn't fit of the weights to begin with, what isn't trained,
    and a warm-up that outlasts a run of `total` steps, `epoch` of them an epoch."""
    told = [f"--init {config.init}: {line}" for line in card.get("init", ())]
    warmup, names = config.schedule.warmup, card.get("untrained", ())
    if names:
        told.append(f"nothing trains {', '.join(names[:5])}{', …' * (len(names) > 5)}: no group of "
                    "the task's parameter_groups() has it; give it one, or freeze it")
    if (steps := warmup.steps(epoch=epoch, total=total)) > total:
        told.append(f"--schedule.warmup {warmup}: the run has {total} steps and the warm-up "
                    f"{steps}, so the rate ends at {total / steps:.0%} of --optim.lr; shorten it, "
                    "such as 5%")
    return told


def announce(
    log: Log, lines: Sequence[str], doubtful: Sequence[str], found: Found | None,
    verdict: resume.Verdict, path: Path,
) -> None:  # fmt: skip
    """Show the card, and how the run starts.

    Args:
        doubtful: see `doubts`.
    """
    for line in lines:
        log.info(line)
    for line in doubtful:
        log.warning(line)
    for change in verdict.changes:
        log.warning(f"changed: {change}")
        log.event("changed", what=change)
    if found is None:
        log.info(f"run folder {near(path)}: a fresh start")
    else:
        log.info(f"run folder {near(path)}: continuing from step {found.step} ({verdict.label}"
                 + (f": {verdict.why}" if verdict.why else "") + ")"
                 + f", restart {log.attempt}" * bool(log.attempt))
    log.event("restore" if found else "fresh", at_step=found.step if found else 0,
              label=verdict.label, why=verdict.why)
