"""The configuration of a run: frozen dataclasses that check their values.

Each setting declares how it may change when a run is resumed: `fixed` (it only acts at the start of
a run), `must_match` (with another value it would be a different run), `may_change` (the change is
reported, and the run is no longer exact) or `ignored` (the setting has no influence on the result).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from trainer.config.fields import Change, Duration, OnOff, Section, setting
from trainer.resilience import fault_injection
from trainer.resilience.preflight import LONGEST_S
from trainer.storage.object_store import check_url
from trainer.storage.secrets import mask

SCHEDULES = ("cosine", "constant", "cosine-annealing", "one-cycle", "warm-restarts", "linear",
             "multi-step", "plateau")  # fmt: skip
"""The last ones, from cosine-annealing on, are torch's, and take options."""
MIN_RATIO = 0.1
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"weight_decay": 0.01, "momentum": 0.9, "nesterov": "off"}}
"""Optimizer → the values of its own settings. Other settings of `Optim` it doesn't read."""
SAMPLERS = ("weighted", "balanced", "like-length", "mixture")
HINTS = ("first-loss", "flat-loss", "rising-norm", "clipped-steps", "small-batchnorm", "odd-sizes",
         "idle-memory", "dead-gradient", "easy-validation", "shared-samples", "overfitting",
         "constant-rate")  # fmt: skip
"""Names of all hints; each has a row in docs/hints.md."""


@dataclass(frozen=True, kw_only=True)
class Batch(Section, prefix="batch."):
    """Batch sizes; gradient accumulation follows from them and the number of ranks."""

    global_size: int = setting(128, "must_match", ">= 1 and <= 10000000")
    """Samples in one optimizer step, over all ranks."""
    micro_size: int = setting(32, "must_match", ">= 1")
    """Samples in one forward and backward; must divide the global size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_size % self.micro_size:
            near = min((d for d in range(1, self.global_size + 1) if self.global_size % d == 0),
                       key=lambda d: abs(d - self.micro_size))
            self.check(False, "micro_size", f"it must divide --batch.global-size "
                       f"{self.global_size}; the nearest divisor is {near}.")

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a full global batch (M)."""
        return self.global_size // self.micro_size


@dataclass(frozen=True, kw_only=True)
class Data(Section, prefix="data."):
    """Reading samples."""

    workers: int | Literal["auto"] = setting("auto", "ignored", ">= 0 and <= 512")
    """Loader processes per rank; auto: 0 for data in memory, else 2 if there are enough cores."""
    prefetch: int = setting(2, "ignored", ">= 1 and <= 10000")
    """Micro-batches that each loader process prepares in advance."""
    drop_last: OnOff = setting("on", "must_match")
    """Drop the last batch of an epoch if it is smaller than the global batch."""
    shuffle: OnOff = setting("on", "must_match")
    """Shuffle each epoch, in an order derived from (seed, epoch)."""
    order: Literal["auto", "permutation", "keyed"] = setting("auto", "must_match")
    """How a shuffled order is made. permutation: a table of 8 bytes a sample; keyed: computed at
    each place, without memory; auto: a permutation up to 2^24 samples, else keyed."""
    sampler: str | None = setting(None, "must_match")
    """weighted, balanced (each class as often), like-length (batches of like length) or mixture (of
    data sets with weights); or your own order, as module:Class (called with the data set and seed=;
    its objects with the epoch and an array of places in it; they return sample indices)."""
    limit: int | None = setting(None, "must_match", ">= 1")
    """Train on the first samples of the training data only, this many; for small runs."""
    stream_resume: Literal["auto", "state", "read-through"] = setting("auto", "may_change")
    """How a restart finds its place in a stream. auto: by the state of the source, which is tried
    at the start; without one, by reading through. state: also by one that brings back other samples
    (not exact). read-through: read the samples of the epoch up to the place once more."""
    on_error: Literal["stop", "skip"] = setting("stop", "ignored")
    """If reading a training sample raises: stop the run, or skip the sample and use another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.sampler is None or ":" in self.sampler or self.sampler in SAMPLERS,
                   "sampler", f"use {', '.join(SAMPLERS)}, or your own as module:Class.")


@dataclass(frozen=True, kw_only=True)
class Optim(Section, prefix="optim."):
    """Optimizer."""

    name: str = setting("adamw", "must_match")
    """adamw (fused), sgd, or your own as module:Class (called with groups, lr, and those of
    weight_decay, betas, eps, momentum and nesterov that are set)."""
    lr: float = setting(3e-3, "may_change", "> 0 and < inf")
    """Peak learning rate."""
    rates: tuple[str, ...] = setting((), "may_change", repeatable=True)
    """PATTERN=FACTOR: the learning rate of parameters whose names match is multiplied by FACTOR,
    such as body.*=0.1; patterns are those of file names, and the first match counts."""
    weight_decay: float | None = setting(None, "may_change", ">= 0 and < inf")
    """Weight decay, 0.01 if not given; not of biases, norms and other parameters with fewer than 2
    dimensions."""
    betas: tuple[float, float] | None = setting(None, "may_change", ">= 0 and < 1")
    """Decay rates of the two moments; adamw: 0.9 0.999."""
    eps: float | None = setting(None, "may_change", "> 0 and < inf")
    """Added to the denominator; adamw: 1e-8."""
    momentum: float | None = setting(None, "may_change", ">= 0 and < 1")
    """Momentum; sgd: 0.9."""
    nesterov: OnOff | None = setting(None, "may_change")
    """Nesterov momentum; sgd: off."""
    options: tuple[str, ...] = setting((), "may_change", repeatable=True)
    """KEY=VALUE: any other argument of the optimizer's class (amsgrad=true, alpha=0.9, etas=0.5,1.2
    is a tuple)."""
    ema: float = setting(0.0, "may_change", ">= 0 and < 1")
    """Decay of a moving average of the weights (such as 0.999), which is validated, tested and
    exported in their place; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.name in DEFAULTS or ":" in self.name, "name",
                   "use adamw, sgd, or your own as module:Class.")
        for text in self.rates:
            pattern, _, factor = text.rpartition("=")
            self.check(bool(pattern) and _is_above_0(factor), "rates",
                       "write PATTERN=FACTOR with a factor above 0, such as body.*=0.1 (to keep "
                       "parameters unchanged, use --freeze).", text)
        for text in self.options:
            key, _, value = text.partition("=")
            self.check(bool(key and value), "options", "write KEY=VALUE, such as amsgrad=true.",
                       text)
        for name, value in DEFAULTS.get(self.name, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Schedule(Section, prefix="schedule."):
    """Learning rate schedule over the optimizer steps."""

    name: str = setting("cosine", "may_change")
    """After the warm-up: cosine (down to min-ratio), constant, one of torch's (cosine-annealing,
    one-cycle, warm-restarts, linear, multi-step, plateau), or your own module:function that maps
    the number of the update (from 0) to a factor of the peak."""
    warmup: Duration = setting(Duration(5, "percent"), "may_change")
    """Linear warm-up to the peak; the first update's rate is peak / warm-up steps, never zero."""
    min_ratio: float | None = setting(None, "may_change", ">= 0 and <= 1")
    """cosine, linear: the rate of the last update as a fraction of the peak; 0.1 if not given."""
    replan: OnOff = setting("off", "may_change")
    """Plan the schedule over the current length of a run that is resumed with another one; off:
    over the length at its first start."""
    options: tuple[str, ...] = setting((), "may_change", repeatable=True)
    """KEY=VALUE: arguments of torch's scheduler class (T_0=1ep, milestones=30ep,60ep, gamma=0.1,
    pct_start=0.3, patience=5), with durations in steps, epochs or percent of the run; plateau also
    takes metric=NAME:max|min (val_loss:min)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.name in SCHEDULES or ":" in self.name, "name",
                   f"use {', '.join(SCHEDULES)}, or your own as module:function.")
        reads_ratio = self.name in ("cosine", "linear") and "end_factor" not in self.arguments
        self.check(self.min_ratio is None or reads_ratio, "min_ratio",
                   f"--schedule.name {self.name} doesn't use it, only cosine and linear (without "
                   "the option end_factor) do; omit the flag.")
        if reads_ratio and self.min_ratio is None:
            object.__setattr__(self, "min_ratio", MIN_RATIO)
        for text in self.options:
            key, _, value = text.partition("=")
            self.check(bool(key and value), "options", "write KEY=VALUE, such as T_0=1ep.", text)
            self.check(self.name in SCHEDULES[2:], "options", f"--schedule.name {self.name} takes "
                       f"no options; omit them, or use one of {', '.join(SCHEDULES[2:])}.", text)

    @property
    def arguments(self) -> dict[str, str]:
        """The options: key → value, both as strings."""
        return {key: value for key, _, value in (text.partition("=") for text in self.options)}


@dataclass(frozen=True, kw_only=True)
class Clip(Section, prefix="clip."):
    """Gradient clipping, once per optimizer step, of the mean gradient of the global batch."""

    norm: float | None = setting(None, "may_change", ">= 0")
    """Maximum global norm, 1 if not given; 0 is off."""
    value: float = setting(0.0, "may_change", ">= 0")
    """Maximum absolute value of an element, instead of clipping by norm; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(not self.norm or not self.value, "norm",
                   f"--clip.value {self.value} replaces it; give one of them.")
        if self.norm is None and not self.value:
            object.__setattr__(self, "norm", 1.0)


@dataclass(frozen=True, kw_only=True)
class Precision(Section, prefix="precision."):
    """Number formats, compilation and memory."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = setting("auto", "may_change")
    """auto: bf16 autocast on CUDA with bf16 units, else fp32. fp16 uses a gradient scaler."""
    compile: Literal["auto", "on", "off", "reduce-overhead", "max-autotune"] = setting(
        "auto", "may_change")
    """torch.compile; auto: on CUDA only. The last two are its modes: CUDA graphs, and these with
    kernels chosen by their speed, which needs --numerics.deterministic off."""
    channels_last: Literal["auto", "on", "off"] = setting("auto", "may_change")
    """channels_last memory layout; auto: on if the model has 2-D convolutions."""
    loss_scale: float = setting(65536.0, "may_change", "> 0 and <= 1e38")
    """fp16: initial loss scale (a larger one would be infinite in fp32)."""
    recompute_every: int = setting(0, "may_change", ">= 0")
    """Activation checkpointing: the backward recomputes every n-th block; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.loss_scale == Precision.loss_scale or self.dtype == "fp16", "loss_scale",
                   "only --precision.dtype fp16 uses it; omit the flag.")


@dataclass(frozen=True, kw_only=True)
class Parallel(Section, prefix="parallel."):
    """Data-parallel training."""

    reduction: Literal["ddp", "canonical"] = setting("ddp", "may_change")
    """How gradients are summed. ddp: DDP's all-reduce; canonical: a fixed tree over the numbered
    micro-batches, with the same bits for any number of ranks (a batch norm sees a micro-batch)."""
    sync_bn: Literal["auto", "on", "off"] = setting("auto", "may_change")
    """Compute BatchNorm statistics over all ranks; auto: on with several ranks, unless the
    reduction is canonical."""
    find_unused: OnOff = setting("off", "may_change")
    """Allow trainable parameters that are unused in some batches (DDP's find_unused_parameters)."""
    bucket_mb: float = setting(25.0, "may_change", "> 0 and <= 1000000")
    """Size in MiB of the buckets for the gradient all-reduce."""
    verify_every: Duration = setting(Duration(100), "ignored")
    """Interval at which ranks compare checksums of weights and optimizer state, as they also do
    before each save. off: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.reduction == "ddp" or self.sync_bn != "on", "sync_bn",
                   "statistics over all ranks depend on their number, which --parallel.reduction "
                   "canonical does not allow; use auto or off, or --parallel.reduction ddp.")


@dataclass(frozen=True, kw_only=True)
class Eval(Section, prefix="eval."):
    """Validation."""

    every: Duration = setting(Duration(1, "epochs"), "may_change")
    """Validation interval; the last step is always validated."""
    every_s: float = setting(0.0, "may_change", ">= 0")
    """Also validate when this many seconds have passed since the last validation; 0 is off."""
    batch_size: int | Literal["auto"] = setting("auto", "may_change", ">= 1")
    """Samples in one forward; auto: twice the micro-batch. Changes the last bits of metrics."""
    batches: int = setting(0, "may_change", ">= 0")
    """Validate this many batches only, evenly spaced in the validation set (of a stream the first);
    0: all. The test always uses all."""
    best: str = setting("auto", "may_change")
    """The metric that selects the best weights, NAME:max or NAME:min (val_loss:min); auto:
    val_accuracy:max if the task reports accuracy, else val_loss:min."""
    patience: int = setting(0, "may_change", ">= 0")
    """Early stopping: end after this many validations in a row without improvement; 0 is off."""
    min_delta: float = setting(0.0, "may_change", ">= 0 and < inf")
    """Early stopping: minimum improvement that counts, in the metric's unit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.best == "auto" or self.best.endswith((":max", ":min")), "best",
                   "write NAME:max or NAME:min, such as val_loss:min.")
        self.check(not self.every_s or not self.patience, "every_s",
                   "the end of the run would depend on the time with --eval.patience "
                   f"{self.patience}; use --eval.every.")
        self.check(not self.min_delta or self.patience > 0, "min_delta",
                   "only early stopping uses it; add --eval.patience.")


def _is_above_0(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class WorldConfig(Section, prefix="world."):
    """Process group."""

    timeout_s: float = setting(60.0, "ignored", "> 0 and <= 1e9")
    """Timeout of a collective in seconds; after it a rank counts as lost."""
    threads: int | Literal["auto"] = setting("auto", "may_change", ">= 1 and <= 1024")
    """Compute threads per rank; auto: OMP_NUM_THREADS, or cores / ranks on this host, and 1 for a
    small model and for a canonical reduction. It changes the last bits."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section, prefix="checkpoint."):
    """Checkpoints."""

    every: Duration = setting(Duration(100), "ignored")
    """Checkpoint interval; the last step is always saved."""
    every_s: float = setting(0.0, "ignored", ">= 0")
    """Also save when this many seconds have passed since the last save; 0 is off."""
    keep: int = setting(3, "ignored", ">= 1")
    """Number of newest checkpoints to keep, besides the best one; a restart continues from them."""
    keep_every: Duration | Literal["cycle"] = setting(Duration(0), "ignored")
    """Also keep one checkpoint per such interval for good; cycle: save and keep each step after
    which the learning rate rises again (the end of a cycle of warm-restarts); off: none."""
    on_error: Literal["continue", "stop"] = setting("continue", "ignored")
    """If a save or its upload fails: continue with the older checkpoint, or stop the run."""
    mirror: str | None = setting(None, "ignored")
    """URL of a copy of the checkpoints in an object store, from which the run continues on an empty
    disk: s3://bucket/prefix, gs://…, az://… or file:///folder; one for each run."""
    mirror_every: Duration | Literal["auto"] = setting("auto", "ignored")
    """Interval of the uploads besides the best weights, the last step and those of a stop; auto:
    each save; off: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mirror is not None:
            try:
                check_url(self.mirror)
            except ValueError as error:
                self.check(False, "mirror", f"{error}.", mask(self.mirror))
        self.check(self.mirror is not None or self.mirror_every == "auto", "mirror_every",
                   "there is no mirror; add --checkpoint.mirror URL.")


@dataclass(frozen=True, kw_only=True)
class Stop(Section, prefix="stop."):
    """Stop on request (SIGTERM, SIGINT, SIGHUP, SIGUSR1)."""

    grace_s: float = setting(30.0, "ignored")
    """Seconds after the signal within which the state must be saved and the run ended."""
    on_notice: str = setting("off", "ignored")
    """Also stop when this machine is to be taken away: aws, gcp or azure asks the provider's
    metadata service; else a command of the shell, whose exit with 0 is the notice."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.on_notice.strip()), "on_notice", "use off, aws, gcp, azure or a "
                   "command of the shell.")
        self.check(0 < self.grace_s <= LONGEST_S or self.grace_s == math.inf, "grace_s",
                   f"use a number > 0 and <= {LONGEST_S:.0e}, or inf.")


@dataclass(frozen=True, kw_only=True)
class BadStepConfig(Section, prefix="nonfinite."):
    """Steps with a NaN or infinite loss or gradient: all ranks skip the update."""

    max_in_row: int = setting(3, "may_change", ">= 0")
    """After this many consecutive bad steps, roll back to the newest checkpoint and skip exactly
    their batches; 0: never."""
    max_total: int = setting(100, "may_change", ">= 0")
    """If the run has more bad steps than this in total, it ends with exit code 77."""
    spike_z: float = setting(0.0, "may_change", ">= 0")
    """Also skip a loss this far above the recent ones (modified z-score; 3.5 is usual, 10 skips
    only extreme outliers); 0 is off."""


@dataclass(frozen=True, kw_only=True)
class Restart(Section, prefix="restart."):
    """Restarts by a launcher after failures."""

    max_same_step: int = setting(3, "ignored", ">= 1")
    """Consecutive failures at the same step after which the run gives up with exit code 76."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Section, prefix="watchdog."):
    """Watchdog: ends a hanging run so that the launcher restarts it."""

    limit_s: float | Literal["auto"] = setting("auto", "ignored", "> 0")
    """Seconds without progress in a step after which a rank counts as stuck; auto: 10 times the
    longest recent pause, at least 30; inf: never. The limit is doubled in validation and saving. A
    rank that computes or reads is not stuck."""
    start_s: float | Literal["auto"] = setting("auto", "ignored", "> 0")
    """The same limit during startup, where model() and dataset() may wait for a network or a
    download; auto: 300, or twice the limit if that is more; inf: never."""


@dataclass(frozen=True, kw_only=True)
class Numerics(Section, prefix="numerics."):
    """Numerical reproducibility and debugging."""

    deterministic: OnOff = setting("on", "may_change")
    """Use deterministic kernels, for exact restarts on CUDA; off is faster there."""
    tf32: OnOff = setting("off", "may_change")
    """CUDA: compute fp32 products in TF32, with 10 bits of mantissa; several times as fast."""
    anomaly: OnOff = setting("off", "may_change")
    """Name the module and operation that first produce a NaN; many times slower, not compiled."""


@dataclass(frozen=True, kw_only=True)
class Logging(Section, prefix="log."):
    """Logging."""

    every: Duration = setting(Duration(50), "ignored")
    """Interval of console lines; metrics.jsonl contains every step."""
    level: Literal["debug", "info", "warning", "error"] = setting("info", "ignored")
    """Minimum level of console lines."""
    sinks: tuple[str, ...] = setting((), "ignored", repeatable=True)
    """Your own sinks for steps and validations, as module:Class (called with the run folder)."""
    tensorboard_every: Duration | Literal["auto"] = setting("auto", "ignored")
    """Interval of TensorBoard scalars of training steps; auto: every step of a run of less than
    1000 steps; in a longer one about 500 points, and at least one in 50 steps."""
    histograms: Duration = setting(Duration(0), "ignored")
    """Interval of TensorBoard histograms of each parameter and gradient (as applied), or off."""
    graph: OnOff = setting("off", "ignored")
    """Write the model's graph to TensorBoard."""
    wandb: Literal["off", "online", "offline"] = setting("off", "ignored")
    """Log to Weights & Biases too; offline: into the run folder, for `wandb sync`."""
    hints_off: tuple[str, ...] = setting((), "ignored", repeatable=True)
    """Names of hints to suppress, or all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.sinks:
            self.check(":" in path, "sinks", "write module:Class.", path)
        for name in self.hints_off:
            self.check(name in (*HINTS, "all"), "hints_off",
                       f"there is no such hint; use {', '.join(HINTS)}, or all.", name)


TaskT = TypeVar("TaskT")


@dataclass(frozen=True, kw_only=True)
class Config(Section, Generic[TaskT]):
    """The complete configuration; `config.toml` in the run folder stores it."""

    task: TaskT = setting(None, "must_match")
    run: str | None = setting(None, "ignored")
    """The run folder. Default: runs/RECIPE, or runs/TASK for a task without a recipe."""
    seed: int = setting(0, "must_match", f">= 0 and < {2**63}")
    """Seed of all random numbers."""
    steps: int | None = setting(None, "may_change", ">= 1")
    """Length of the run in optimizer steps (global batches)."""
    epochs: int | None = setting(None, "may_change", ">= 1")
    """Length of the run in epochs, instead of --steps; 5 if neither is given."""
    overfit: int | None = setting(None, "may_change", ">= 2")
    """Train on the first global batch alone, for this many steps and without validation, and check
    that its loss falls: a task that can't learn one batch learns nothing."""
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "may_change")
    """auto: cuda if available, else mps for a single process, else cpu."""
    resume: str = setting("auto", "ignored")
    """auto: continue the run in the run folder; never: fail if it holds a run; or the PATH of a
    checkpoint or run to start from."""
    init: str | None = setting(None, "fixed")
    """Initial weights: a safetensors file, a torch checkpoint, or a folder with a
    model.safetensors; a head of another size keeps the model's own initial values."""
    init_strict: OnOff = setting("on", "fixed")
    """Fail if initial weights don't fit the model; off: load those that fit, list the others."""
    freeze: tuple[str, ...] = setting((), "must_match", repeatable=True)
    """PATTERN: don't train the parameters whose names match, nor the statistics of their batch
    norms; !PATTERN excludes some again, and the last match counts (such as * and !fc.*)."""
    freeze_until: Duration = setting(Duration(0), "must_match")
    """Train the parameters of --freeze too after this part of the run; off: never."""
    start_checks: OnOff = setting("on", "ignored")
    """Check at the start, on the first micro-batch, what exactness needs of the task; off: train
    without the checks of the loss and of a stream's states."""
    accept: tuple[str, ...] = setting((), "ignored", repeatable=True)
    """Changed settings (batch.global-size, data, …) that a resumed run accepts."""
    inject: tuple[str, ...] = setting((), "ignored", repeatable=True)
    """Faults to inject: KIND[:rank=R][:step=S][:epoch=E][:phase=P][:attempt=A][:always]."""
    batch: Batch = Batch()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    clip: Clip = Clip()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    world: WorldConfig = WorldConfig()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    stop: Stop = Stop()
    nonfinite: BadStepConfig = BadStepConfig()
    restart: Restart = Restart()
    watchdog: WatchdogConfig = WatchdogConfig()
    numerics: Numerics = Numerics()
    log: Logging = Logging()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.run is None or bool(self.run.strip()), "run", "give the path of a folder.")
        self.check(self.steps is None or self.epochs is None, "steps",
                   f"--epochs {self.epochs} sets the length of the run too; give one of them.")
        if self.overfit is not None:
            self._plan_overfit(self.overfit)
        self.precision.check(
            self.numerics.deterministic == "off" or self.precision.compile != "max-autotune",
            "compile", "it chooses kernels by their speed, so a restart could have other bits; add "
            "--numerics.deterministic off, or use on.")
        name = self.schedule.name
        self.checkpoint.check(
            self.checkpoint.keep_every != "cycle" or ":" in name or name in (
                "warm-restarts", "cosine-annealing"), "keep_every",
            f"the rate of --schedule.name {name} does not rise after it has fallen, so it has no "
            "cycles; use warm-restarts or a function of your own, or a length such as 10ep.")
        self.check(not self.freeze_until.value or bool(self.freeze), "freeze_until",
                   "nothing is frozen; add --freeze PATTERN.")
        for text in self.inject:
            fault_injection.parse_fault(text)
        known = {name for name, _, change in self.leaves() if change == "must_match"} | {"data"}
        for name in self.accept:
            self.check(
                name.replace("-", "_") in known or name.startswith("task."), "accept",
                f"there is no such setting; use task.FIELD, {', '.join(sorted(known))}.", name)

    def _plan_overfit(self, steps: int) -> None:
        """Set the length and the data of a run on one batch."""
        size = self.batch.global_size
        self.check(self.epochs is None and self.steps in (None, steps), "overfit",
                   "it is the length of the run; omit --steps and --epochs.")
        self.check(self.data.limit in (None, size) and self.data.sampler is None, "overfit",
                   "it trains on the first global batch; omit --data.limit and --data.sampler.")
        turns = getattr(self.task, "turns", ()) and hasattr(self.task, "optimizers")
        self.check(not turns, "overfit", "the task's turns have losses "
                   "that need not fall; use --data.limit and --steps for a small run.")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "data", dataclasses.replace(
            self.data, limit=size, shuffle="off", order="auto"))

    def leaves(self) -> Iterator[tuple[str, Any, Change]]:
        """All settings as (dotted name, value, change on resume), the task's fields included."""
        yield from _leaves(self, "", "ignored")


def without_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name; of those recorded by a version without --optim.options, only what
    that run read. Later versions refuse the others."""
    recorded = {f"optim.{name}" for settings in DEFAULTS.values() for name in settings}
    if "optim.options" in values or not recorded <= values.keys():
        return dict(values)
    name, decay = values.get("optim.name", "adamw"), values["optim.weight_decay"]
    read = {f"optim.{field}" for field in DEFAULTS.get(name, ())}
    if ":" in name and decay != DEFAULTS["adamw"]["weight_decay"]:
        read.add("optim.weight_decay")
    unread = recorded - read
    if values.get("schedule.name") not in ("cosine", "linear"):
        unread.add("schedule.min_ratio")
    if values.get("clip.value"):
        unread.add("clip.norm")
    if values.get("steps") is not None:
        unread.add("epochs")
    return {name: value for name, value in values.items() if name not in unread}


def _leaves(part: Any, prefix: str, change: Change) -> Iterator[tuple[str, Any, Change]]:
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), prefix + field.metadata.get("flag", field.name)
        own: Change = field.metadata.get("change", change)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration | type):
            yield from _leaves(value, name + ".", own)
        else:
            yield name, value, own
