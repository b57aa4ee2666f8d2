"""Configuration sections about operation: processes, checkpoints, failures, logging."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.fields import OnOff, Texts, Typed, check, setting
from trainer.config.length import Length
from trainer.resilience.preflight import LONGEST_S

HINTS = (
    "first-loss", "flat-loss", "rising-norm", "clipped-steps", "small-batchnorm", "odd-sizes",
    "idle-memory", "dead-gradient", "easy-validation", "shared-samples", "overfitting",
    "constant-rate",
)  # fmt: skip
"""Names of all hints; each has a row in docs/hints.md."""

MOST_THREADS = 1024
"""Upper limit: more than any host has cores; with tens of thousands a process can't start."""


@dataclass(frozen=True, kw_only=True)
class Ranks(Typed):
    """Process group."""

    timeout_s: float = setting(60.0, "ignored")
    """Timeout of a collective in seconds; after it a rank counts as lost."""
    threads: int | Literal["auto"] = setting("auto", "may_change")
    """Compute threads per rank; auto: cores / ranks on this host. The number influences the last
    bits of results."""

    def __post_init__(self) -> None:
        check(0 < self.timeout_s <= LONGEST_S, "world.timeout-s", self.timeout_s,
              f"use a number above 0 and up to {LONGEST_S:.0e} (thirty years).")
        check(self.threads == "auto" or 1 <= self.threads <= MOST_THREADS, "world.threads",
              self.threads, f"use auto, or 1 to {MOST_THREADS}.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Typed):
    """Checkpoints."""

    every: Length = setting(Length(100), "ignored")
    """Checkpoint interval in steps, epochs or percent of the run, or off (the last step is always
    saved)."""
    every_s: float = setting(0.0, "ignored")
    """Also save when this many seconds have passed since the last save; 0 is off."""
    keep: int = setting(3, "ignored")
    """Number of newest checkpoints to keep, besides the best one."""
    keep_every: Length = setting(Length(0), "ignored")
    """Also keep one checkpoint per such interval for good; off: none."""
    on_error: Literal["continue", "stop"] = setting("continue", "ignored")
    """If a save fails: continue with the older checkpoint, or stop the run."""

    def __post_init__(self) -> None:
        check(self.keep >= 1, "checkpoint.keep", self.keep,
              "use 1 or more: the newest checkpoint is what a restart continues from.")
        check(self.every_s >= 0, "checkpoint.every-s", self.every_s, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Stop(Typed):
    """Stop on request (SIGTERM, SIGINT, SIGHUP, SIGUSR1)."""

    grace_s: float = setting(30.0, "ignored")
    """Seconds after the signal within which the state must be saved and the run ended."""

    def __post_init__(self) -> None:
        check(0 < self.grace_s <= LONGEST_S or self.grace_s == math.inf, "stop.grace-s",
              self.grace_s, f"use a number above 0 and up to {LONGEST_S:.0e}, or inf.")


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Typed):
    """Steps with a NaN or infinite loss or gradient: all ranks skip the update."""

    max_in_row: int = setting(3, "may_change")
    """After this many consecutive bad steps, roll back to the newest checkpoint and skip exactly
    their batches; 0: never."""
    max_total: int = setting(100, "may_change")
    """If the run has more bad steps than this in total, it ends with exit code 77."""
    spike_z: float = setting(0.0, "may_change")
    """Also skip a loss that lies this far above the recent ones (modified z-score; 3.5 is usual, 10
    skips only extreme outliers); 0 is off."""

    def __post_init__(self) -> None:
        check(self.max_in_row >= 0, "nonfinite.max-in-row", self.max_in_row,
              "use 0 (never go back) or more.")
        check(self.max_total >= 0, "nonfinite.max-total", self.max_total, "use 0 or more.")
        check(self.spike_z >= 0, "nonfinite.spike-z", self.spike_z, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Restart(Typed):
    """Restarts by a launcher after failures."""

    max_same_step: int = setting(3, "ignored")
    """Consecutive failures at the same step after which the run gives up with exit code 76."""

    def __post_init__(self) -> None:
        check(self.max_same_step >= 1, "restart.max-same-step", self.max_same_step,
              "use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Watch(Typed):
    """Watchdog: ends a hanging run so that the launcher restarts it."""

    limit_s: float | Literal["auto"] = setting("auto", "ignored")
    """Seconds without progress in a step after which a rank counts as stuck; auto: 10 times the
    longest recent pause, at least 30; inf: never. The limit is doubled in validation and saving. A
    rank that computes or reads is not stuck."""
    start_s: float | Literal["auto"] = setting("auto", "ignored")
    """The same limit during startup, where model() and dataset() may wait for a network or a
    download; auto: 300, or twice the limit if that is more; inf: never."""

    def __post_init__(self) -> None:
        for name, value in (("limit-s", self.limit_s), ("start-s", self.start_s)):
            check(value == "auto" or value > 0, f"watchdog.{name}", value,
                  "use auto or more than 0.")


@dataclass(frozen=True, kw_only=True)
class Numerics(Typed):
    """Numerical reproducibility and debugging."""

    deterministic: OnOff = setting("on", "may_change")
    """Use deterministic kernels, for exact restarts on CUDA; off is faster there."""
    tf32: OnOff = setting("off", "may_change")
    """CUDA: compute fp32 products in TF32, with 10 bits of mantissa; several times as fast."""
    anomaly: OnOff = setting("off", "may_change")
    """Check the result of every operation and name the module and operation that first produce a
    NaN; many times slower, and never compiled."""


@dataclass(frozen=True, kw_only=True)
class Logging(Typed):
    """Logging."""

    every: Length = setting(Length(50), "ignored")
    """Interval of console lines; metrics.jsonl contains every step."""
    level: Literal["debug", "info", "warning", "error"] = setting("info", "ignored")
    """Minimum level of console lines."""
    sinks: Texts = setting((), "ignored")
    """Your own sinks for steps and validations, as module:Class (called with the run folder)."""
    tensorboard_every: Length = setting(Length(50), "ignored")
    """Interval of TensorBoard scalars of training steps."""
    histograms: Length = setting(Length(0), "ignored")
    """Interval of TensorBoard histograms of each parameter and each gradient (as applied); off:
    none."""
    graph: OnOff = setting("off", "ignored")
    """Write the model's graph to TensorBoard."""
    wandb: Literal["off", "online", "offline"] = setting("off", "ignored")
    """Log to Weights & Biases too (pip install '.[wandb]'); offline: into the run folder, for
    `wandb sync`."""
    hints_off: Texts = setting((), "ignored")
    """Names of hints to suppress, or all."""

    def __post_init__(self) -> None:
        for path in self.sinks:
            check(":" in path, "log.sinks", path, "write module:Class.")
        for name in self.hints_off:
            near = difflib.get_close_matches(name, HINTS, n=1)
            check(name in (*HINTS, "all"), "log.hints-off", name,
                  f"there is no such hint; did you mean {near[0]}?" if near else
                  f"there is no such hint; use {', '.join(HINTS)}, or all.")
