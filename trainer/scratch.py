"""A run for a look at its steps: built like any other, in a folder that is thrown away."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer import cli
from trainer.build import build
from trainer.config import Schedule
from trainer.errors import ConfigError
from trainer.length import Length
from trainer.log import Log
from trainer.parts import Parts
from trainer.pulse import ProgressMarks, Subscriber
from trainer.start import start
from trainer.status import Phase
from trainer.stop import StopRequest
from trainer.world import Launch, World


@contextlib.contextmanager
def scratch_run(
    argv: Sequence[str], *, steps: int, command: str, clock: Subscriber | None = None
) -> Iterator[Parts]:
    """The parts of a fresh run of the task, warmed up, with weights of its own, in this process
    alone; the run folder of the configuration isn't looked at.

    Args:
        argv: recipe and flags, as for training; the schedule is constant, and nothing is saved.
        steps: the most that will be made.
        command: named in errors.

    Raises:
        ConfigError: the configuration is wrong, or a launcher has started several ranks.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(f"trainer {command}: it is for one process; start it without a launcher.")
    config, off, log = cli.parse(argv), Length(0), Log(level="warning")
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        own = dataclasses.replace(
            config, run=str(Path(folder) / "run"), steps=steps, epochs=None, resume="auto",
            inject=(), schedule=Schedule(name="constant", warmup=off),
            checkpoint=dataclasses.replace(config.checkpoint, every=off),
            eval=dataclasses.replace(config.eval, every=off, best="auto"),
            log=dataclasses.replace(
                config.log, level="warning", every=off, tensorboard_every=off, histograms=off,
                graph="off", wandb="off", hints_off=("all",)),
        )  # fmt: skip
        threads = None if config.world.threads == "auto" else config.world.threads
        with World.form(device=config.device, threads=threads, launch=Launch()) as world:
            marks = ProgressMarks(log.status)
            if clock is not None:
                marks.subscribe(clock)
            parts = build(own, world, log, StopRequest(), marks)
            try:
                start(parts)
                parts.status.enter(Phase.TRAIN)
                yield parts
            finally:
                parts.loader.close()
                parts.metrics.close()
                log.close()
