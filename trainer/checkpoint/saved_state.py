"""The content of a checkpoint's state.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.progress import BestTracker, TrainProgress
from trainer.errors import CheckpointDamaged, FileDamaged
from trainer.storage.jsonl import FileMark
from trainer.storage.layout import STATE
from trainer.storage.records import (
    Kind,
    is_count,
    is_flag,
    is_positive,
    is_text,
    list_of,
    optional,
    read_record,
    table_of,
)
from trainer.telemetry.metrics import METRIC_LINE

LARGEST_WORLD = 1 << 20
"""Ranks, or threads of a rank, are fewer."""


def _size(value: Any) -> bool:
    return is_positive(value) and value < LARGEST_WORLD


KIND = Kind(
    needed={
        "progress": Kind({**dict.fromkeys(("step", "skipped", "validated", "replaced"), is_count),
                          **dict.fromkeys(("bad", "left_out"), list_of(is_count))}),
        "best": Kind({"metric": is_text, "direction": is_text, "value": optional(is_text),
                      "step": is_count, "waited": is_count}, {"mark": optional(is_text)}),
        "meter": table_of(), "optimizer": table_of(), "scaler": table_of(),
        "schedule": Kind(known={"counters": table_of(),
                                "named": table_of(Kind({"counters": table_of()}))}),
        "parts": Kind(known={"horizon": Kind({"epoch": is_count, "total": is_count}),
                             "cycles": Kind({"ends": list_of(is_count), "falls": is_flag})},
                      others=table_of())},
    known={
        "ema": table_of(), "rng": list_of(is_text), "lines": list_of(METRIC_LINE),
        "record": Kind({"offset": is_count, "checked": is_count, "checksum": is_text},
                       others=lambda _: False),
        "settings": Kind(known={
            "batch.global_size": is_positive, "batch.micro_size": is_positive,
            "optim.name": is_text}),
        "circumstances": Kind(known={
            "samples": optional(is_count), "splits": table_of(optional(is_text)),
            "origin": lambda value: list_of(is_count)(value) and len(value) <= 3,
            "threads": _size, "world_size": _size,
            "packages": table_of(optional(is_text)), "code": table_of(is_text)}),
        "inexact": list_of(is_text)})
"""What is relied on before the parts of the training state load their own entries."""


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
        """Parse state.json. Raises CheckpointDamaged if it isn't one."""
        if why := KIND.problem(entries):
            raise CheckpointDamaged(f"{STATE}: {why}")
        known = {name: entries[name] for name in cls.__dataclass_fields__ if name in entries}
        try:
            known["progress"] = TrainProgress.from_json(entries["progress"])
            known["best"] = BestTracker.from_json(entries["best"])
        except ValueError as error:  # no float in hexadecimal digits
            raise CheckpointDamaged(f"{STATE}: best: {error}") from error
        if "record" in known:
            known["record"] = FileMark(**known["record"])
        return cls(**known)

    def for_validation(self, fingerprints: Mapping[str, str | None]) -> SavedState:
        """This state on data with these fingerprints. If it was saved on other validation data, the
        best value, the patience and those of the schedule `plateau` begin anew."""
        then = self.circumstances.get("splits", {})
        if all(then.get(split, now) == now for split, now in fingerprints.items()
               if split.startswith("validation")):
            return self
        return dataclasses.replace(self, best=BestTracker(), schedule=_unjudged(self.schedule))

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """As `from_json`; also raises OSError."""
        try:
            return cls.from_json(read_record(folder / STATE) or {})
        except FileDamaged as error:
            raise CheckpointDamaged(str(error)) from error


def _unjudged(schedule: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a schedule, or of several by name, without what `plateau` has seen."""
    if "named" in schedule:
        return {"named": {name: _unjudged(one) for name, one in schedule["named"].items()}}
    counters = {name: value for name, value in schedule.get("counters", {}).items()
                if name not in ("best", "num_bad_epochs", "cooldown_counter")}
    return {**schedule, "counters": counters}
