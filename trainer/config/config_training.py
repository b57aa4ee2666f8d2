"""Configuration sections about training: batches, data, optimizer, schedule, precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config.fields import OnOff, Texts, Typed, check, setting
from trainer.config.length import Length

SCHEDULES = ("cosine", "constant", "cosine-annealing", "one-cycle", "warm-restarts", "linear",
             "multi-step", "plateau")  # fmt: skip

MIN_RATIO = 0.1
"""Default final rate of cosine and linear, as a fraction of the peak."""
MOST_SAMPLES = 10_000_000
"""Upper limit of samples per optimizer step: some hundred times the usual sizes."""
MOST_AHEAD = 10_000
"""Upper limit of prefetched micro-batches per worker: far more than hide any delay."""
MOST_MB = 1_000_000
"""Upper limit of a bucket's size: more memory than any device has."""
MOST_SCALE = 1e38
"""Upper limit of the loss scale: a larger one is infinite in fp32, and halving keeps it so."""
MOST_WORKERS = 512
"""Upper limit of loader processes per rank: far more than it has cores."""


@dataclass(frozen=True, kw_only=True)
class Batch(Typed):
    """Batch sizes; gradient accumulation follows from them and the number of ranks."""

    global_size: int = setting(128, "must_match")
    """Samples in one optimizer step, over all ranks."""
    micro_size: int = setting(32, "must_match")
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
                  f"it must divide --batch.global-size {self.global_size}; the nearest divisor "
                  f"is {near}.")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a full global batch (M)."""
        return self.global_size // self.micro_size


@dataclass(frozen=True, kw_only=True)
class Data(Typed):
    """Reading samples."""

    workers: int | Literal["auto"] = setting("auto", "ignored")
    """Loader processes per rank; auto: 0 for data in memory, else 2 if there are enough cores."""
    prefetch: int = setting(2, "ignored")
    """Micro-batches that each loader process prepares in advance."""
    drop_last: OnOff = setting("on", "must_match")
    """Drop the last batch of an epoch if it is smaller than the global batch."""
    shuffle: OnOff = setting("on", "must_match")
    """Shuffle each epoch, in an order derived from (seed, epoch)."""
    on_error: Literal["stop", "skip"] = setting("stop", "ignored")
    """If reading a training sample raises: stop the run, or skip the sample and use another one."""

    def __post_init__(self) -> None:
        check(self.workers == "auto" or 0 <= self.workers <= MOST_WORKERS, "data.workers",
              self.workers, f"use auto, or 0 to {MOST_WORKERS}.")
        check(1 <= self.prefetch <= MOST_AHEAD, "data.prefetch", self.prefetch,
              f"use 1 to {MOST_AHEAD}.")


@dataclass(frozen=True, kw_only=True)
class Optim(Typed):
    """Optimizer."""

    name: str = setting("adamw", "must_match")
    """adamw (fused), sgd, or your own as module:Class (called with groups, lr, weight_decay)."""
    lr: float = setting(3e-3, "may_change")
    """Peak learning rate."""
    rates: Texts = setting((), "may_change")
    """PATTERN=FACTOR: the learning rate of parameters whose names match is multiplied by FACTOR,
    such as body.*=0.1; patterns are those of file names, and the first match counts."""
    weight_decay: float = setting(0.01, "may_change")
    """Weight decay; not applied to biases, norms and other parameters with fewer than 2
    dimensions."""
    betas: tuple[float, float] = setting((0.9, 0.999), "may_change")
    """AdamW: decay rates of the two moments."""
    eps: float = setting(1e-8, "may_change")
    """AdamW: added to the denominator."""
    momentum: float = setting(0.9, "may_change")
    """SGD: momentum."""
    nesterov: OnOff = setting("off", "may_change")
    """SGD: Nesterov momentum."""
    ema: float = setting(0.0, "may_change")
    """Decay of an exponential moving average of the weights (such as 0.999), which is then
    validated, tested and exported in their place; 0 is off."""

    def __post_init__(self) -> None:
        check(self.name in ("adamw", "sgd") or ":" in self.name, "optim.name", self.name,
              "use adamw, sgd, or your own as module:Class.")
        check(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "use a rate above 0.")
        for text in self.rates:
            pattern, _, factor = text.rpartition("=")
            check(bool(pattern) and _is_above_0(factor), "optim.rates", text,
                  "write PATTERN=FACTOR with a factor above 0, such as body.*=0.1 (to keep "
                  "parameters unchanged, use --freeze).")
        check(0 <= self.weight_decay < math.inf, "optim.weight-decay", self.weight_decay,
              "use 0 or more.")
        check(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas,
              "use two numbers from 0 to below 1.")
        check(0 < self.eps < math.inf, "optim.eps", self.eps, "use a number above 0.")
        check(0 <= self.momentum < 1, "optim.momentum", self.momentum,
              "use a number from 0 to below 1.")
        check(self.nesterov == "off" or self.momentum > 0, "optim.nesterov", self.nesterov,
              "it needs --optim.momentum above 0.")
        check(0 <= self.ema < 1, "optim.ema", self.ema,
              "use a number from 0 (off) to below 1.")


@dataclass(frozen=True, kw_only=True)
class Schedule(Typed):
    """Learning rate schedule over the optimizer steps."""

    name: str = setting("cosine", "may_change")
    """After the warm-up: cosine (down to min-ratio), constant, one of torch's (cosine-annealing,
    one-cycle, warm-restarts, linear, multi-step, plateau), or your own module:function that maps
    the number of the update (from 0) to a factor of the peak."""
    warmup: Length = setting(Length(5, "percent"), "may_change")
    """Linear warm-up to the peak; the first update's rate is peak / warm-up steps, never zero."""
    min_ratio: float = setting(MIN_RATIO, "may_change")
    """cosine, linear: the rate of the last update as a fraction of the peak."""
    options: Texts = setting((), "may_change")
    """KEY=VALUE: arguments of torch's scheduler class (T_0=1ep, milestones=30ep,60ep, gamma=0.1,
    pct_start=0.3, patience=5), with durations in steps, epochs or percent of the run; plateau also
    takes metric=NAME:max|min (val_loss:min)."""

    def __post_init__(self) -> None:
        check(self.name in SCHEDULES or ":" in self.name, "schedule.name", self.name,
              f"use {', '.join(SCHEDULES)}, or your own as module:function.")
        check(0 <= self.min_ratio <= 1, "schedule.min-ratio", self.min_ratio,
              "use a number from 0 to 1.")
        check(self.min_ratio == MIN_RATIO or self.name in ("cosine", "linear"),
              "schedule.min-ratio", self.min_ratio,
              f"--schedule.name {self.name} doesn't use it, only cosine and linear do; omit the "
              "flag.")
        for text in self.options:
            key, _, value = text.partition("=")
            check(bool(key and value), "schedule.options", text,
                  "write KEY=VALUE, such as T_0=1ep.")
            check(self.name not in ("cosine", "constant") and ":" not in self.name,
                  "schedule.options", text,
                  f"--schedule.name {self.name} takes no options; omit them, or use one of "
                  f"{', '.join(s for s in SCHEDULES if s not in ('cosine', 'constant'))}.")

    @property
    def arguments(self) -> dict[str, str]:
        """The options: key → value, both as strings."""
        return {key: value for key, _, value in (text.partition("=") for text in self.options)}


@dataclass(frozen=True, kw_only=True)
class Clip(Typed):
    """Gradient clipping, once per optimizer step, of the mean gradient of the global batch."""

    norm: float = setting(1.0, "may_change")
    """Maximum global norm; 0 is off."""
    value: float = setting(0.0, "may_change")
    """Maximum absolute value of an element; 0 is off. Replaces clipping by norm."""

    def __post_init__(self) -> None:
        check(self.norm >= 0, "clip.norm", self.norm, "use 0 (off) or more.")
        check(self.value >= 0, "clip.value", self.value, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Precision(Typed):
    """Number formats, compilation and memory."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = setting("auto", "may_change")
    """auto: bf16 autocast on CUDA with bf16 units, else fp32. fp16 uses a gradient scaler."""
    compile: Literal["auto", "on", "off"] = setting("auto", "may_change")
    """torch.compile; auto: on CUDA only."""
    channels_last: Literal["auto", "on", "off"] = setting("auto", "may_change")
    """channels_last memory layout; auto: on if the model has 2-D convolutions."""
    loss_scale: float = setting(65536.0, "may_change")
    """fp16: initial loss scale."""
    recompute_every: int = setting(0, "may_change")
    """Activation checkpointing: the backward recomputes the activations of every n-th block instead
    of keeping them in memory; 0 is off."""

    def __post_init__(self) -> None:
        check(self.recompute_every >= 0, "precision.recompute-every", self.recompute_every,
              "use 0 (off), 1 (each block) or more.")
        check(0 < self.loss_scale <= MOST_SCALE, "precision.loss-scale", self.loss_scale,
              f"use a number above 0 and up to {MOST_SCALE:.0e}.")


@dataclass(frozen=True, kw_only=True)
class Parallel(Typed):
    """Data-parallel training."""

    reduction: Literal["ddp", "canonical"] = setting("ddp", "may_change")
    """How gradients are summed. ddp: DDP's all-reduce; canonical: a fixed tree over the numbered
    micro-batches, with the same bits for any number of ranks (a batch norm sees a micro-batch)."""
    sync_bn: Literal["auto", "on", "off"] = setting("auto", "may_change")
    """Compute BatchNorm statistics over all ranks; auto: on with several ranks, unless the
    reduction is canonical."""
    find_unused: OnOff = setting("off", "may_change")
    """Allow trainable parameters that are unused in some batches (DDP's find_unused_parameters)."""
    bucket_mb: float = setting(25.0, "may_change")
    """Size in MiB of the buckets for the gradient all-reduce."""
    verify_every: Length = setting(Length(100), "ignored")
    """Interval at which ranks compare checksums of weights and optimizer state; they also compare
    them before each save. off: never."""

    def __post_init__(self) -> None:
        check(self.reduction == "ddp" or self.sync_bn != "on", "parallel.sync-bn", self.sync_bn,
              "statistics over all ranks depend on their number, which --parallel.reduction "
              "canonical does not allow; use auto or off, or --parallel.reduction ddp.")
        check(0 < self.bucket_mb <= MOST_MB, "parallel.bucket-mb", self.bucket_mb,
              f"use a number above 0 and up to {MOST_MB}.")


@dataclass(frozen=True, kw_only=True)
class Eval(Typed):
    """Validation."""

    every: Length = setting(Length(1, "epochs"), "may_change")
    """Validation interval; the last step is always validated."""
    batch_size: int | Literal["auto"] = setting("auto", "may_change")
    """Samples in one forward; auto: twice the micro-batch. It influences the last bits of the
    metrics."""
    best: str = setting("auto", "may_change")
    """The metric that selects the best weights, NAME:max or NAME:min (val_loss:min); auto:
    val_accuracy:max if the task reports accuracy, else val_loss:min."""
    patience: int = setting(0, "may_change")
    """Early stopping: end the run after this many consecutive validations without improvement; 0
    is off."""
    min_delta: float = setting(0.0, "may_change")
    """Early stopping: minimum improvement that counts, in the metric's unit."""

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
