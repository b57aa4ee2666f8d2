"""Runs of the trainer in this process, for benchmarks that measure inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from trainer.config import command_line
from trainer.distributed.world import LaunchInfo, World
from trainer.optim import precision
from trainer.resilience.stop_signals import StopSignals
from trainer.resilience.watchdog import Watchdog
from trainer.run.build import build
from trainer.run.run import BuiltRun
from trainer.telemetry.events import Log


@contextlib.contextmanager
def builder() -> Iterator[Callable[..., BuiltRun]]:
    """A function that builds a run on one rank with one thread from flags."""
    log = Log(level="error")
    precision.set_determinism(True)
    with (World.form(device="cpu", threads=1, launch=LaunchInfo()) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        def make(*flags: str) -> BuiltRun:
            config = command_line.parse_config([*flags, "--device=cpu", "--log.level=error"])
            return build(config, world, log, StopSignals(), watchdog.marks)
        yield make
