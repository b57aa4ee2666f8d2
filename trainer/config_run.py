"""Sections of the configuration that say how a run is spread, kept, watched and shown."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Literal

from trainer.leaf import OnOff, Texts, Typed, check, leaf
from trainer.length import Length
from trainer.limits import LONGEST_S

HINTS = (
    "first-loss", "flat-loss", "rising-norm", "clipped-steps", "small-batchnorm", "odd-sizes",
    "idle-memory", "dead-gradient", "easy-validation", "shared-samples", "overfitting",
    "constant-rate",
)  # fmt: skip
"""What can be hinted at, each with a row in docs/hints.md."""

MOST_THREADS = 1024
"""More than the cores of any host; with tens of thousands a process can't start."""


@dataclass(frozen=True, kw_only=True)
class Ranks(Typed):
    """The process group."""

    timeout_s: float = leaf(60.0, "free")
    """Seconds that a collective may take before the rank counts as lost."""
    threads: int | Literal["auto"] = leaf("auto", "announced")
    """Threads of a rank's computation; auto: cores / ranks on this machine. It moves bits."""

    def __post_init__(self) -> None:
        check(0 < self.timeout_s <= LONGEST_S, "world.timeout-s", self.timeout_s,
              f"use more than 0, and {LONGEST_S:.0e} (thirty years) at most.")
        check(self.threads == "auto" or 1 <= self.threads <= MOST_THREADS, "world.threads",
              self.threads, f"use auto, or 1 to {MOST_THREADS}.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Typed):
    """What is saved, and when."""

    every: Length = leaf(Length(100), "free")
    """Interval of checkpoints: steps, epochs, a part of the run, or off (the last step's is
    always made)."""
    every_s: float = leaf(0.0, "free")
    """Also save when this many seconds have passed since the last one; 0 is off."""
    keep: int = leaf(3, "free")
    """The newest checkpoints that stay, beside the best one."""
    keep_every: Length = leaf(Length(0), "free")
    """Of the older ones, those of each such interval stay too; off: none."""
    on_error: Literal["continue", "stop"] = leaf("continue", "free")
    """A save that fails: go on with the older checkpoint, or stop the run."""

    def __post_init__(self) -> None:
        check(self.keep >= 1, "checkpoint.keep", self.keep,
              "use 1 or more: the newest checkpoint is what a restart continues from.")
        check(self.every_s >= 0, "checkpoint.every-s", self.every_s, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Stop(Typed):
    """Stopping on request (SIGTERM, SIGINT, SIGHUP, SIGUSR1)."""

    grace_s: float = leaf(30.0, "free")
    """Seconds from the signal on within which the state is saved and the run has ended."""

    def __post_init__(self) -> None:
        check(0 < self.grace_s <= LONGEST_S or self.grace_s == math.inf, "stop.grace-s",
              self.grace_s, f"use more than 0, and {LONGEST_S:.0e} at most, or inf.")


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Typed):
    """Steps whose loss or gradient is NaN or infinite: on all ranks the update is left out."""

    max_in_row: int = leaf(3, "announced")
    """After so many in a row go back to the newest checkpoint and leave out exactly those batches;
    0 is never."""
    max_total: int = leaf(100, "announced")
    """More than so many in the whole run end it, with exit code 77."""
    spike_z: float = leaf(0.0, "announced")
    """Treat a loss alike that lies this far above the recent ones (modified z-score; 3.5 is usual,
    10 catches only what is far out); 0 is off."""

    def __post_init__(self) -> None:
        check(self.max_in_row >= 0, "nonfinite.max-in-row", self.max_in_row,
              "use 0 (never go back) or more.")
        check(self.max_total >= 0, "nonfinite.max-total", self.max_total, "use 0 or more.")
        check(self.spike_z >= 0, "nonfinite.spike-z", self.spike_z, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Restart(Typed):
    """Failures that a launcher answers with another attempt."""

    max_same_step: int = leaf(3, "free")
    """Failures in a row at the same step after which the run gives up, with exit code 76."""

    def __post_init__(self) -> None:
        check(self.max_same_step >= 1, "restart.max-same-step", self.max_same_step,
              "use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Watch(Typed):
    """The watchdog: a run that doesn't get on is ended, so that it is started again."""

    limit_s: float | Literal["auto"] = leaf("auto", "free")
    """Seconds without a sign of life inside a step after which a rank counts as stuck; auto: 10
    times the longest recent pause, at least 30; inf: never. Twice that in validation and saving;
    a rank that computes or reads isn't stuck."""
    start_s: float | Literal["auto"] = leaf("auto", "free")
    """The same while a rank builds and warms up, where model() and dataset() may wait for a network
    or a download; auto: 300, or twice the limit if that is more; inf: never."""

    def __post_init__(self) -> None:
        for name, value in (("limit-s", self.limit_s), ("start-s", self.start_s)):
            check(value == "auto" or value > 0, f"watchdog.{name}", value,
                  "use auto or more than 0.")


@dataclass(frozen=True, kw_only=True)
class Numerics(Typed):
    """What the bits of the result depend on."""

    deterministic: OnOff = leaf("on", "announced")
    """Deterministic kernels: exact restarts on CUDA; off buys speed there."""
    tf32: OnOff = leaf("off", "announced")
    """CUDA: products of fp32 numbers in TF32, with 10 bits of mantissa, several times as fast."""
    anomaly: OnOff = leaf("off", "announced")
    """Look at the result of every operation and name the module and the operation that first make
    a NaN; many times slower, never compiled."""


@dataclass(frozen=True, kw_only=True)
class Logging(Typed):
    """What is shown."""

    every: Length = leaf(Length(50), "free")
    """Interval of console lines; metrics.jsonl has each step."""
    level: Literal["debug", "info", "warning", "error"] = leaf("info", "free")
    """Least level of console lines."""
    sinks: Texts = leaf((), "free")
    """Your own sinks of steps and validations, as module:Class (called with the run's folder)."""
    tensorboard_every: Length = leaf(Length(50), "free")
    """Interval of TensorBoard's scalars of training steps."""
    histograms: Length = leaf(Length(0), "free")
    """Interval of TensorBoard's histograms of each parameter and each gradient (as it was applied);
    off: none."""
    graph: OnOff = leaf("off", "free")
    """Show the model's graph in TensorBoard."""
    wandb: Literal["off", "online", "offline"] = leaf("off", "free")
    """Show the run at Weights & Biases too (pip install '.[wandb]'); offline: into the run folder,
    for `wandb sync`."""
    hints_off: Texts = leaf((), "free")
    """Hints about the training that are not to be given: their names, or all."""

    def __post_init__(self) -> None:
        for path in self.sinks:
            check(":" in path, "log.sinks", path, "write module:Class.")
        for name in self.hints_off:
            near = difflib.get_close_matches(name, HINTS, n=1)
            check(name in (*HINTS, "all"), "log.hints-off", name,
                  f"no such hint; did you mean {near[0]}?" if near else
                  f"no such hint; there are {', '.join(HINTS)}, and all.")
