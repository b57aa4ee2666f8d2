"""What a run is given, the folder that holds it, and where it continues (see `build`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.mirror import MirrorSource
from trainer.checkpoint.mirror_uploads import MirrorUploads
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.store import Store
from trainer.config.compatibility import ResumeDecision
from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.resilience.fault_injection import Fault
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import StopSignals
from trainer.run.run_dir import RunIdentity
from trainer.storage.locks import RunLock
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import Metrics
from trainer.telemetry.status import Status


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a run is given."""

    config: Config[Any]
    world: World
    log: Log
    stop: StopSignals
    marks: ProgressMarks
    path: Path
    """The run folder."""
    resume_from: Path
    init: Path

    @property
    def status(self) -> Status:
        return self.log.status


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The run in the folder, and the attempt's claim on it."""

    identity: RunIdentity
    lock: RunLock
    store: Store
    faults: Sequence[Fault]
    mirror: MirrorUploads | None = None
    """Set on rank 0 of a run with a mirror."""
    source: MirrorSource = field(default_factory=MirrorSource)
    """What rank 0 has found in the mirror."""
    generation: int = 0
    """The least generation of this attempt's checkpoints: that of the mirror's fence."""
    metrics: Metrics = field(default_factory=Metrics)
    given_hints: set[str] = field(default_factory=set)
    """Names of the hints that are off or that the run has given; `Hints` adds to it."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where the run continues."""

    found: CheckpointRef | None
    decision: ResumeDecision
    position: int
    """Completed steps."""
    circumstances: Mapping[str, Any]
    """Facts besides the configuration on which bits depend; saved with each checkpoint."""
    initial_weights: Sequence[str] = ()
    """Report on the weights of --init."""
