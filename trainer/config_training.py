"""Sections of the configuration that say what is trained, on what, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.leaf import OnOff, Texts, Typed, check, leaf
from trainer.length import Length

SCHEDULES = ("cosine", "constant", "cosine-annealing", "one-cycle", "warm-restarts", "linear",
             "multi-step", "plateau")  # fmt: skip

MIN_RATIO = 0.1
"""Where cosine and linear end, unless told."""
MOST_SAMPLES = 10_000_000
"""In one optimizer step: some hundred times what is trained with."""
MOST_AHEAD = 10_000
"""Micro-batches that a worker makes ready: far more than hide any delay."""
MOST_MB = 1_000_000
"""Of a bucket: more than any device has."""
MOST_SCALE = 1e38
"""Of a loss: a larger one is infinite in fp32, and would stay so however often it is halved."""
MOST_WORKERS = 512
"""Processes of one rank: far more than it has cores."""


@dataclass(frozen=True, kw_only=True)
class Batch(Typed):
    """Samples an optimizer step; accumulation follows from these and the number of ranks."""

    global_size: int = leaf(128, "refused")
    """Samples in one optimizer step, over all ranks."""
    micro_size: int = leaf(32, "refused")
    """Samples in one forward and backward; must divide the global size."""

    def __post_init__(self) -> None:
        check(self.global_size >= 1, "batch.global-size", self.global_size, "use 1 or more.")
        check(self.micro_size >= 1, "batch.micro-size", self.micro_size, "use 1 or more.")
        check(self.global_size <= MOST_SAMPLES, "batch.global-size", self.global_size,
              f"use {MOST_SAMPLES} or less.")
        if self.global_size % self.micro_size:
            divisors = [d for d in range(1, self.global_size + 1) if self.global_size % d == 0]
            near = min(divisors, key=lambda d: (abs(d - self.micro_size), d))
            check(False, "batch.micro-size", self.micro_size,
                  f"it must divide --batch.global-size {self.global_size}; the nearest that does "
                  f"is {near}.")

    @property
    def micro_batches(self) -> int:
        """M, the number of numbered micro-batches in a full global batch."""
        return self.global_size // self.micro_size


@dataclass(frozen=True, kw_only=True)
class Data(Typed):
    """How samples are read."""

    workers: int | Literal["auto"] = leaf("auto", "free")
    """Loader processes a rank; auto: none for data in memory, otherwise 2 where cores allow."""
    prefetch: int = leaf(2, "free")
    """Micro-batches that each loader worker makes ready ahead."""
    drop_last: OnOff = leaf("on", "refused")
    """Leave out the last window of an epoch if it is smaller than the global batch."""
    shuffle: OnOff = leaf("on", "refused")
    """Order each epoch anew, by (seed, epoch)."""
    on_error: Literal["stop", "skip"] = leaf("stop", "free")
    """A training sample that raises: stop the run, or skip the sample: another takes its place."""

    def __post_init__(self) -> None:
        check(self.workers == "auto" or 0 <= self.workers <= MOST_WORKERS, "data.workers",
              self.workers, f"use auto, or 0 to {MOST_WORKERS}.")
        check(1 <= self.prefetch <= MOST_AHEAD, "data.prefetch", self.prefetch,
              f"use 1 to {MOST_AHEAD}.")


@dataclass(frozen=True, kw_only=True)
class Optim(Typed):
    """The optimizer."""

    name: str = leaf("adamw", "refused")
    """adamw (fused), sgd, or your own as module:Class (called with groups, lr, weight_decay)."""
    lr: float = leaf(3e-3, "announced")
    """Peak learning rate."""
    rates: Texts = leaf((), "announced")
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
        check(0 <= self.weight_decay < math.inf, "optim.weight-decay", self.weight_decay,
              "use 0 or more.")
        check(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas,
              "each lies from 0 up to, not including, 1.")
        check(0 < self.eps < math.inf, "optim.eps", self.eps, "use a number above 0.")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum,
              "it lies from 0 up to, not including, 1.")
        check(self.nesterov == "off" or self.momentum > 0, "optim.nesterov", self.nesterov,
              "it needs --optim.momentum above 0.")
        check(0 <= self.ema < 1, "optim.ema", self.ema,
              "it lies from 0 (off) up to, not including, 1.")


@dataclass(frozen=True, kw_only=True)
class Schedule(Typed):
    """The learning rate over the optimizer steps."""

    name: str = leaf("cosine", "announced")
    """After the warm-up: cosine (down to min-ratio), constant, one of torch's (cosine-annealing,
    one-cycle, warm-restarts, linear, multi-step, plateau), or your own module:function, from the
    number of the update (from 0) to a factor of the peak."""
    warmup: Length = leaf(Length(5, "percent"), "announced")
    """Linear rise to the peak, the first update at peak / warm-up steps (never zero)."""
    min_ratio: float = leaf(MIN_RATIO, "announced")
    """cosine, linear: the last update's rate as a part of the peak."""
    options: Texts = leaf((), "announced")
    """KEY=VALUE: arguments of torch's class (T_0=1ep, milestones=30ep,60ep, gamma=0.1,
    pct_start=0.3, patience=5), lengths in steps, epochs or as a part of the run; plateau also has
    metric=NAME:max|min (val_loss:min)."""

    def __post_init__(self) -> None:
        check(self.name in SCHEDULES or ":" in self.name, "schedule.name", self.name,
              f"use {', '.join(SCHEDULES)}, or your own as module:function.")
        check(0 <= self.min_ratio <= 1, "schedule.min-ratio", self.min_ratio,
              "it lies from 0 to 1.")
        check(self.min_ratio == MIN_RATIO or self.name in ("cosine", "linear"),
              "schedule.min-ratio", self.min_ratio,
              f"--schedule.name {self.name} doesn't use it, only cosine and linear do; leave it "
              "out.")
        for text in self.options:
            key, _, value = text.partition("=")
            check(bool(key and value), "schedule.options", text,
                  "write KEY=VALUE, such as T_0=1ep.")
            check(self.name not in ("cosine", "constant") and ":" not in self.name,
                  "schedule.options", text,
                  f"--schedule.name {self.name} takes no options; leave them out, or use one of "
                  f"{', '.join(s for s in SCHEDULES if s not in ('cosine', 'constant'))}.")

    @property
    def arguments(self) -> dict[str, str]:
        """The options by key, as texts."""
        return {key: value for key, _, value in (text.partition("=") for text in self.options)}


@dataclass(frozen=True, kw_only=True)
class Clip(Typed):
    """Gradient clipping, once per optimizer step, on the mean gradient of the global batch."""

    norm: float = leaf(1.0, "announced")
    """Largest global norm; 0 is off."""
    value: float = leaf(0.0, "announced")
    """Largest absolute value of an element; 0 is off. Used instead of the norm."""

    def __post_init__(self) -> None:
        check(self.norm >= 0, "clip.norm", self.norm, "use 0 (off) or more.")
        check(self.value >= 0, "clip.value", self.value, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Precision(Typed):
    """Number formats, compilation, memory layout."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = leaf("auto", "announced")
    """auto: bf16 autocast on CUDA with bf16 units, else fp32. fp16 uses a gradient scaler."""
    compile: Literal["auto", "on", "off"] = leaf("auto", "announced")
    """torch.compile; auto: on CUDA only."""
    channels_last: Literal["auto", "on", "off"] = leaf("auto", "announced")
    """Memory layout of conv nets; auto: on where the model has 2-D convolutions."""
    loss_scale: float = leaf(65536.0, "announced")
    """fp16: initial scale of the loss."""
    recompute_every: int = leaf(0, "announced")
    """Activation checkpointing: of every n-th block the backward computes the activations anew
    instead of keeping them in memory; 0 is off."""

    def __post_init__(self) -> None:
        check(self.recompute_every >= 0, "precision.recompute-every", self.recompute_every,
              "use 0 (off), 1 (each block) or more.")
        check(0 < self.loss_scale <= MOST_SCALE, "precision.loss-scale", self.loss_scale,
              f"use more than 0, and {MOST_SCALE:.0e} at most.")


@dataclass(frozen=True, kw_only=True)
class Parallel(Typed):
    """Several ranks."""

    reduction: Literal["ddp", "canonical"] = leaf("ddp", "announced")
    """How gradients are summed: DDP's all-reduce; or a fixed tree over the numbers of the
    micro-batches, with the same bits for any number of ranks (batch norms see a micro-batch)."""
    sync_bn: Literal["auto", "on", "off"] = leaf("auto", "announced")
    """BatchNorm statistics over all ranks; auto: where there are several, unless the reduction is
    canonical."""
    find_unused: OnOff = leaf("off", "announced")
    """Allow trainable parameters that some batches don't use (DDP's find_unused_parameters)."""
    bucket_mb: float = leaf(25.0, "announced")
    """Size of the buckets in which gradients are all-reduced, in MiB."""
    verify_every: Length = leaf(Length(100), "free")
    """Interval at which ranks compare checksums of weights and optimizer; they do so before each
    save too. off: never."""

    def __post_init__(self) -> None:
        check(self.reduction == "ddp" or self.sync_bn != "on", "parallel.sync-bn", self.sync_bn,
              "with --parallel.reduction canonical nothing may depend on the number of ranks, as "
              "statistics over all of them do; use auto or off, or --parallel.reduction ddp.")
        check(0 < self.bucket_mb <= MOST_MB, "parallel.bucket-mb", self.bucket_mb,
              f"use more than 0, and {MOST_MB} at most.")


@dataclass(frozen=True, kw_only=True)
class Eval(Typed):
    """Validation."""

    every: Length = leaf(Length(1, "epochs"), "announced")
    """Interval of validations; the last step is always validated."""
    batch_size: int | Literal["auto"] = leaf("auto", "announced")
    """Samples in one forward; auto: twice the micro-batch. It moves bits of the scores."""
    best: str = leaf("auto", "announced")
    """What the best weights are chosen by, NAME:max or NAME:min (val_loss:min); auto:
    val_accuracy:max where the task reports accuracy, else val_loss:min."""
    patience: int = leaf(0, "announced")
    """End the run after so many validations in a row without a better one; 0 is off."""
    min_delta: float = leaf(0.0, "announced")
    """How much better it has to be for that, in the figure's own unit."""

    def __post_init__(self) -> None:
        check(self.patience >= 0, "eval.patience", self.patience, "use 0 (off) or more.")
        check(0 <= self.min_delta < math.inf, "eval.min-delta", self.min_delta, "use 0 or more.")
        check(self.batch_size == "auto" or self.batch_size >= 1, "eval.batch-size",
              self.batch_size, "use auto, 1 or more.")
        check(self.best == "auto" or self.best.endswith((":max", ":min")), "eval.best", self.best,
              "write NAME:max or NAME:min, such as val_loss:min.")


def _is_above_0(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
