"""The whole run as frozen dataclasses with checks.

Each leaf says how it may change when a run is resumed: `refused` (the run would be another one),
`announced` (it goes on, differently, and says so) or `free` (it changes no bit of the result).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from trainer import faults
from trainer.config_run import (
    Checkpoint,
    Logging,
    Nonfinite,
    Numerics,
    Ranks,
    Restart,
    Stop,
    Watch,
)
from trainer.config_training import (
    Batch,
    Clip,
    Data,
    Eval,
    Optim,
    Parallel,
    Precision,
    Schedule,
)
from trainer.leaf import Change, OnOff, Texts, Typed, check, leaf
from trainer.length import Length

__all__ = [
    "Batch", "Checkpoint", "Clip", "Config", "Data", "Eval", "Logging", "Nonfinite", "Numerics",
    "Optim", "Parallel", "Precision", "Ranks", "Restart", "Schedule", "Stop", "Watch",
]  # fmt: skip

TaskT = TypeVar("TaskT")


@dataclass(frozen=True, kw_only=True)
class Config(Typed, Generic[TaskT]):
    """A run, whole. `config.toml` in the run folder holds it and reproduces the run."""

    task: TaskT = leaf(None, "refused")
    run: str | None = leaf(None, "free")
    """The run folder; the same command continues what is in it. Default: runs/RECIPE, or
    runs/TASK for a task without a recipe."""
    seed: int = leaf(0, "refused")
    """All randomness follows from it."""
    steps: int | None = leaf(None, "announced")
    """Length of the run in optimizer steps (global batches)."""
    epochs: int | None = leaf(None, "announced")
    """Length of the run in epochs, if --steps isn't given; 5 if neither is."""
    device: Literal["auto", "cpu", "cuda", "mps"] = leaf("auto", "announced")
    """auto: cuda where there is one, mps for a single process, else cpu."""
    resume: str = leaf("auto", "free")
    """auto: continue what the run folder holds; never: refuse a used folder; or the PATH of a
    checkpoint to start from."""
    init: str | None = leaf(None, "refused")
    """Weights to begin with: a safetensors file, a torch checkpoint, or a folder with a
    model.safetensors; a head of another size is left as the model makes it."""
    init_strict: OnOff = leaf("on", "refused")
    """Refuse weights whose names or sizes don't fit; off: take what fits and name the rest."""
    freeze: Texts = leaf((), "refused")
    """PATTERN: parameters whose names match aren't trained, nor their batch norms' statistics;
    !PATTERN takes some out again, the last match counts (such as * and !fc.*)."""
    accept: Texts = leaf((), "free")
    """Changed keys (batch.global-size, data, …) that a resumed run is to accept all the same."""
    inject: Texts = leaf((), "free")
    """Faults for drills: KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:always]."""
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
        check(self.run is None or bool(str(self.run).strip()), "run", self.run, "name a folder.")
        check(_is_utf8(str(self.run)), "run", self.run, "choose a name in UTF-8: the libraries "
              "that read the checkpoints know no other ones.")
        check(bool(str(self.resume).strip()), "resume", self.resume,
              "use auto, never, or the path of a checkpoint.")
        check(self.init is None or bool(str(self.init).strip()), "init", self.init,
              "name a file of weights, or leave it out.")
        check(self.steps is None or self.steps >= 1, "steps", self.steps, "use 1 or more.")
        check(self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "use 1 or more.")
        check(0 <= self.seed < 2**63, "seed", self.seed, "use a number from 0 to 2^63 - 1.")
        for text in self.inject:
            faults.parse(text)
        known = {name for name, _, change in self.leaves() if change == "refused"} | {"data"}
        for name in self.accept:
            check(name.replace("-", "_") in known or name.startswith("task."), "accept", name,
                   f"no such key; there are task.FIELD, {', '.join(sorted(known))}.")

    def leaves(self) -> Iterator[tuple[str, Any, Change]]:
        """Each leaf as (dotted name, value, how it may change on resume); the task's fields too."""
        yield from _leaves(self, "", "free")

    def total_steps(self, epoch: int) -> int:
        """Length of the run in optimizer steps, for epochs of `epoch` steps."""
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
