"""The configuration of a run: frozen dataclasses that check their values.

Each setting declares how it may change when a run is resumed: `must_match` (with another value it
would be a different run), `may_change` (the change is reported, and the run is no longer exact) or
`ignored` (the setting has no influence on the result).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from trainer.config.config_run import (
    Checkpoint,
    Logging,
    Nonfinite,
    Numerics,
    Ranks,
    Restart,
    Stop,
    Watch,
)
from trainer.config.config_training import (
    Batch,
    Clip,
    Data,
    Eval,
    Optim,
    Parallel,
    Precision,
    Schedule,
)
from trainer.config.fields import Change, OnOff, RunDir, Texts, Typed, check, setting
from trainer.config.length import Length
from trainer.resilience import fault_injection

__all__ = [
    "Batch", "Checkpoint", "Clip", "Config", "Data", "Eval", "Logging", "Nonfinite", "Numerics",
    "Optim", "Parallel", "Precision", "Ranks", "Restart", "Schedule", "Stop", "Watch",
]  # fmt: skip

TaskT = TypeVar("TaskT")


@dataclass(frozen=True, kw_only=True)
class Config(Typed, Generic[TaskT]):
    """The complete configuration; `config.toml` in the run folder stores it."""

    task: TaskT = setting(None, "must_match")
    run: RunDir = setting(None, "ignored")
    """The run folder; the same command continues the run in it. Default: runs/RECIPE, or
    runs/TASK for a task without a recipe."""
    seed: int = setting(0, "must_match")
    """Seed of all random numbers."""
    steps: int | None = setting(None, "may_change")
    """Length of the run in optimizer steps (global batches)."""
    epochs: int | None = setting(None, "may_change")
    """Length of the run in epochs, if --steps is not given; 5 if neither is given."""
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "may_change")
    """auto: cuda if available, else mps for a single process, else cpu."""
    resume: str = setting("auto", "ignored")
    """auto: continue the run in the run folder; never: fail if the folder holds a run; or the PATH
    of a checkpoint or run to start from."""
    init: str | None = setting(None, "must_match")
    """Initial weights: a safetensors file, a torch checkpoint, or a folder with a
    model.safetensors; a head of another size keeps the model's own initial values."""
    init_strict: OnOff = setting("on", "must_match")
    """Fail if names or shapes of the initial weights don't fit the model; off: load the ones that
    fit and list the others."""
    freeze: Texts = setting((), "must_match")
    """PATTERN: don't train the parameters whose names match, nor the statistics of their batch
    norms; !PATTERN excludes some again, and the last match counts (such as * and !fc.*)."""
    accept: Texts = setting((), "ignored")
    """Changed settings (batch.global-size, data, …) that a resumed run shall accept."""
    inject: Texts = setting((), "ignored")
    """Faults to inject: KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:always]."""
    batch: Batch = Batch()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    clip: Clip = Clip()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    world: Ranks = Ranks()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    stop: Stop = Stop()
    nonfinite: Nonfinite = Nonfinite()
    restart: Restart = Restart()
    watchdog: Watch = Watch()
    numerics: Numerics = Numerics()
    log: Logging = Logging()

    def __post_init__(self) -> None:
        check(self.run is None or bool(str(self.run).strip()), "run-dir", self.run,
              "give the path of a folder.")
        check(_is_utf8(str(self.run)), "run-dir", self.run, "choose a name in UTF-8: the "
              "libraries that read checkpoints accept no other names.")
        check(bool(str(self.resume).strip()), "resume", self.resume,
              "use auto, never, or the path of a checkpoint.")
        check(self.init is None or bool(str(self.init).strip()), "init", self.init,
              "give the path of a weights file, or omit the flag.")
        check(self.steps is None or self.steps >= 1, "steps", self.steps, "use 1 or more.")
        check(self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "use 1 or more.")
        check(0 <= self.seed < 2**63, "seed", self.seed, "use a number from 0 to 2^63 - 1.")
        for text in self.inject:
            fault_injection.parse(text)
        known = {name for name, _, change in self.leaves() if change == "must_match"} | {"data"}
        for name in self.accept:
            check(name.replace("-", "_") in known or name.startswith("task."), "accept", name,
                   f"there is no such setting; use task.FIELD, {', '.join(sorted(known))}.")

    def leaves(self) -> Iterator[tuple[str, Any, Change]]:
        """All settings as (dotted name, value, change on resume), the task's fields included."""
        yield from _leaves(self, "", "ignored")

    def total_steps(self, epoch: int) -> int:
        """Length of the run in optimizer steps.

        Args:
            epoch: steps of an epoch.
        """
        return self.steps if self.steps is not None else (self.epochs or 5) * epoch


def _leaves(part: Any, prefix: str, change: Change) -> Iterator[tuple[str, Any, Change]]:
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), prefix + field.metadata.get("flag", field.name)
        own: Change = field.metadata.get("change", change)
        if dataclasses.is_dataclass(value) and not isinstance(value, Length | type):
            yield from _leaves(value, name + ".", own)
        else:
            yield name, value, own


def _is_utf8(path: str) -> bool:
    try:
        path.encode(errors="surrogateescape").decode()
    except UnicodeError:
        return False
    return True
