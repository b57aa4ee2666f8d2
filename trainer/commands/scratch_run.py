"""Temporary runs for measuring steps: built like any other run, in a temporary folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config import command_line
from trainer.config.fields import Duration
from trainer.config.schema import Config, Schedule
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.optim.precision import set_determinism
from trainer.resilience.progress_marks import ProgressMarks, Subscriber
from trainer.resilience.stop_signals import StopSignals
from trainer.run.build import build
from trainer.run.run import Run
from trainer.run.warmup import start
from trainer.step import StepResult
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase


@contextlib.contextmanager
def in_scratch_folder(argv: Sequence[str], command: str) -> Iterator[Config[Any]]:
    """The configuration of a new run in a temporary folder, from the arguments of a training run;
    its console shows warnings only. Refuses to be one of several ranks."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(f"{command} runs in one process; start it without a launcher, as python "
                          "-m trainer.")
    config = command_line.parse_config(argv)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        yield silent(config, Path(folder))


def silent(config: Config[Any], folder: Path) -> Config[Any]:
    """The configuration of a new run below a folder, without records, uploads and faults."""
    off = Duration(0)
    return dataclasses.replace(
        config, run=str(folder / "run"), resume="auto", inject=(),
        checkpoint=dataclasses.replace(config.checkpoint, mirror=None, mirror_every="auto"),
        log=dataclasses.replace(
            config.log, level="warning", every=off, tensorboard_every=off, histograms=off,
            graph="off", wandb="off", hints_off=("all",)))


@contextlib.contextmanager
def scratch_run(
    argv: Sequence[str], *, steps: int, command: str, clock: Subscriber | None = None
) -> Iterator[Run]:
    """Build and warm up a new run in this process, from the arguments of a training run."""
    with (in_scratch_folder(argv, f"trainer {command}") as config,
          started(config, Log(level="warning"), steps=steps, clock=clock) as run):
        yield run


@contextlib.contextmanager
def started(
    config: Config[Any], log: Log, *, steps: int, clock: Subscriber | None = None
) -> Iterator[Run]:
    """Build and warm up a new run in this process. Its weights are newly initialized, the schedule
    is constant, and nothing is saved."""
    off = Duration(0)
    scratch = dataclasses.replace(
        config, steps=steps, epochs=None, overfit=None,
        schedule=Schedule(name="constant", warmup=off),
        checkpoint=dataclasses.replace(config.checkpoint, every=off),
        eval=dataclasses.replace(config.eval, every=off, best="auto"))
    set_determinism(config.numerics.deterministic == "on")
    with World.form(device=config.device, threads=config.world.threads,
                    launch=LaunchInfo()) as world:
        marks = ProgressMarks(log.status)
        if clock is not None:
            marks.subscribe(clock)
        built = build(scratch, world, log, StopSignals(), marks)
        try:
            run = start(built)
            log.status.enter(Phase.TRAIN)
            yield run
        finally:
            built.guard.abandon()
            built.guard.release()
            log.close()


def next_step(run: Run) -> StepResult:
    """Make the next step, in the next epoch if the stream's epoch has ended."""
    while (result := run.step(run.loader.window())) is None:
        run.loader.next_epoch()
    return result
