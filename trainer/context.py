"""What every stage of a run's construction needs, and the claim on its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.faults import FaultInjector
from trainer.folder import Identity
from trainer.lock import RunLock
from trainer.log import Log
from trainer.pulse import ProgressMarks
from trainer.stop import StopRequest
from trainer.world import World


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every stage of the construction needs."""

    config: Config[Any]
    world: World
    log: Log
    stop: StopRequest
    marks: ProgressMarks
    path: Path
    """The run folder."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The identity of the run, and what guards its folder."""

    identity: Identity
    lock: RunLock
    injector: FaultInjector
