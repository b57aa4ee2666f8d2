"""The content of a checkpoint's state.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.progress import BestTracker, TrainProgress
from trainer.errors import CheckpointDamaged
from trainer.storage.jsonl import FileMark
from trainer.storage.layout import STATE


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Everything that a checkpoint holds besides tensors. Entries with a default are empty if an
    older version of the trainer has not written them."""

    progress: TrainProgress
    best: BestTracker
    meter: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    scaler: dict[str, Any]
    parts: dict[str, Any]
    ema: dict[str, Any] = field(default_factory=dict)
    rng: list[str] = field(default_factory=list)
    """Digest of each rank's random generators."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The last metric lines, which metrics.jsonl may not have."""
    record: FileMark | None = None
    """Position in metrics.jsonl at which `lines` begin."""
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings by dotted name."""
    circumstances: dict[str, Any] = field(default_factory=dict)
    """What else the bits depend on, see `compatibility.compare_settings`."""
    inexact: list[str] = field(default_factory=list)
    """Why the run up to here is only equivalent to an undisturbed one."""

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> SavedState:
        """Parse state.json. Raises CheckpointDamaged if a necessary entry is missing."""
        known = {name: entries[name] for name in cls.__dataclass_fields__ if name in entries}
        try:
            known["progress"] = TrainProgress.from_json(entries["progress"])
            known["best"] = BestTracker.from_json(entries["best"])
            for name in ("meter", "optimizer", "schedule", "scaler", "parts"):
                known[name] = entries[name]
        except KeyError as error:
            raise CheckpointDamaged(f"{STATE} has no entry {error}") from error
        if "record" in known:
            known["record"] = FileMark(**known["record"])
        return cls(**known)

    def for_validation(self, fingerprint: str | None) -> SavedState:
        """This state on validation data with a fingerprint. If it was saved on other data, the best
        value, the patience and those of the schedule `plateau` begin anew."""
        if self.circumstances.get("splits", {}).get("validation", fingerprint) == fingerprint:
            return self
        return dataclasses.replace(self, best=BestTracker(), schedule=_unjudged(self.schedule))

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """As `from_json`. Raises OSError or ValueError too if the file can't be read or parsed."""
        return cls.from_json(json.loads((folder / STATE).read_bytes()))


def _unjudged(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a schedule, or of several by name, without what `plateau` has seen."""
    if "named" in schedule:
        return {"named": {name: _unjudged(one) for name, one in schedule["named"].items()}}
    counters = {name: value for name, value in schedule["counters"].items()
                if name not in ("best", "num_bad_epochs", "cooldown_counter")}
    return {**schedule, "counters": counters}
