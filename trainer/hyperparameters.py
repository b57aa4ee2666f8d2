"""What the updates of the weights follow: optimizer, schedule, clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.leaf import OnOff, check, leaf
from trainer.length import Length

SCHEDULES = ("cosine", "constant", "cosine-annealing", "one-cycle", "warm-restarts", "linear",
             "multi-step", "plateau")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer."""

    name: str = leaf("adamw", "refused")
    """adamw (fused), sgd, or your own as module:Class (called with groups, lr, weight_decay)."""
    lr: float = leaf(3e-3, "announced")
    """Peak learning rate."""
    rates: tuple[str, ...] = leaf((), "announced")
    """PATTERN=FACTOR: parameters whose names match (as file names do) learn at FACTOR times the
    rate, such as body.*=0.1; the first match counts."""
    weight_decay: float = leaf(0.01, "announced")
    """Decay of weights; biases and norms (and parameters of fewer than 2 dimensions) have none."""
    betas: tuple[float, float] = leaf((0.9, 0.999), "announced")
    """AdamW: decay rates of the two moments."""
    eps: float = leaf(1e-8, "announced")
    """AdamW: added to the denominator."""
    momentum: float = leaf(0.9, "announced")
    """SGD: momentum."""
    nesterov: OnOff = leaf("off", "announced")
    """SGD: Nesterov's momentum."""
    ema: float = leaf(0.0, "announced")
    """Decay of an average of the weights over the updates (0.999), which is then what is
    validated, tested and exported; 0 is off."""

    def __post_init__(self) -> None:
        check(self.name in ("adamw", "sgd") or ":" in self.name, "optim.name", self.name,
              "use adamw, sgd, or your own as module:Class.")
        check(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "use a rate above 0.")
        for text in self.rates:
            pattern, _, factor = text.rpartition("=")
            check(bool(pattern) and _is_above_0(factor), "optim.rates", text,
                  "write PATTERN=FACTOR with a factor above 0, such as body.*=0.1 (parameters "
                  "that aren't to move at all: --freeze).")
        check(self.weight_decay >= 0, "optim.weight-decay", self.weight_decay, "use 0 or more.")
        check(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas,
              "each lies from 0 up to, not including, 1.")
        check(self.eps > 0, "optim.eps", self.eps, "use a number above 0.")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum,
              "it lies from 0 up to, not including, 1.")
        check(self.nesterov == "off" or self.momentum > 0, "optim.nesterov", self.nesterov,
              "it needs --optim.momentum above 0.")
        check(0 <= self.ema < 1, "optim.ema", self.ema,
              "it lies from 0 (off) up to, not including, 1.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the optimizer steps."""

    name: str = leaf("cosine", "announced")
    """After the warm-up: cosine (down to min-ratio), constant, one of torch's (cosine-annealing,
    one-cycle, warm-restarts, linear, multi-step, plateau), or your own module:function, from the
    number of the update (from 0) to a factor of the peak."""
    warmup: Length = leaf(Length(5, "percent"), "announced")
    """Linear rise to the peak, the first update at peak / warm-up steps (never zero)."""
    min_ratio: float = leaf(0.1, "announced")
    """cosine, linear: the last update's rate as a part of the peak."""
    options: tuple[str, ...] = leaf((), "announced")
    """KEY=VALUE: arguments of torch's class (T_0=1ep, milestones=30ep,60ep, gamma=0.1,
    pct_start=0.3, patience=5), lengths in steps, epochs or as a part of the run; plateau also has
    metric=NAME:max|min (val_loss:min)."""

    def __post_init__(self) -> None:
        check(self.name in SCHEDULES or ":" in self.name, "schedule.name", self.name,
              f"use {', '.join(SCHEDULES)}, or your own as module:function.")
        check(0 <= self.min_ratio <= 1, "schedule.min-ratio", self.min_ratio,
              "it lies from 0 to 1.")
        for text in self.options:
            key, _, value = text.partition("=")
            check(bool(key and value), "schedule.options", text,
                  "write KEY=VALUE, such as T_0=1ep.")

    @property
    def arguments(self) -> dict[str, str]:
        """The options by key, as texts."""
        return {key: value for key, _, value in (text.partition("=") for text in self.options)}


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Gradient clipping, once per optimizer step, on the mean gradient of the global batch."""

    norm: float = leaf(1.0, "announced")
    """Largest global norm; 0 is off."""
    value: float = leaf(0.0, "announced")
    """Largest absolute value of an element; 0 is off. Used instead of the norm."""

    def __post_init__(self) -> None:
        check(self.norm >= 0, "clip.norm", self.norm, "use 0 (off) or more.")
        check(self.value >= 0, "clip.value", self.value, "use 0 (off) or more.")


def _is_above_0(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
