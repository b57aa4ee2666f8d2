"""Inputs of all stages of a run's construction, and the claim on its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.resilience.fault_injection import FaultInjector
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run.run_dir import RunIdentity
from trainer.storage.locks import RunLock
from trainer.telemetry.events import Log


@dataclass(frozen=True, kw_only=True)
class Context:
    """Inputs of all stages of the construction."""

    config: Config[Any]
    world: World
    log: Log
    stop: StopSignals
    marks: ProgressMarks
    path: Path
    """The run folder."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Identity of the run, the lock on its folder, and the injected faults."""

    identity: RunIdentity
    lock: RunLock
    injector: FaultInjector
