"""The whole run as frozen dataclasses with checks.

Each leaf says how it may change when a run is resumed: `refused` (the run would be another one),
`announced` (it goes on, differently, and says so) or `free` (it changes no bit of the result).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from trainer import faults
from trainer.errors import ConfigError
from trainer.length import Length

TaskT = TypeVar("TaskT")
OnOff = Literal["on", "off"]
Change = Literal["refused", "announced", "free"]


def leaf(default: Any, change: Change) -> Any:
    """A configuration field with its default and how it may change on resume."""
    return dataclasses.field(default=default, metadata={"change": change})


def _check(condition: bool, flag: str, value: object, remedy: str) -> None:
    if not condition:
        raise ConfigError(f"--{flag} {value}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples an optimizer step; accumulation follows from these and the number of ranks."""

    global_size: int = leaf(128, "refused")
    """Samples in one optimizer step, over all ranks."""
    micro_size: int = leaf(32, "refused")
    """Samples in one forward and backward; must divide the global size."""

    def __post_init__(self) -> None:
        _check(self.global_size >= 1, "batch.global-size", self.global_size, "use 1 or more.")
        _check(self.micro_size >= 1, "batch.micro-size", self.micro_size, "use 1 or more.")
        divisors = [d for d in range(1, self.global_size + 1) if self.global_size % d == 0]
        near = min(divisors, key=lambda d: (abs(d - self.micro_size), d))
        _check(self.global_size % self.micro_size == 0, "batch.micro-size", self.micro_size,
               f"it must divide --batch.global-size {self.global_size}; the nearest that does is "
               f"{near}.")

    @property
    def micro_batches(self) -> int:
        """M, the number of numbered micro-batches in a full global batch."""
        return self.global_size // self.micro_size


@dataclass(frozen=True, kw_only=True)
class Data:
    """How samples are read."""

    workers: int | Literal["auto"] = leaf("auto", "free")
    """Loader processes a rank; auto: none for data in memory, otherwise 2 where cores allow."""
    prefetch: int = leaf(2, "free")
    """Micro-batches made ready ahead, in each loader worker and on the device."""
    drop_last: OnOff = leaf("on", "refused")
    """Leave out the last window of an epoch if it is smaller than the global batch."""
    shuffle: OnOff = leaf("on", "refused")
    """Order each epoch anew, by (seed, epoch)."""

    def __post_init__(self) -> None:
        _check(self.workers == "auto" or self.workers >= 0, "data.workers", self.workers,
               "use auto, 0 or more.")
        _check(self.prefetch >= 1, "data.prefetch", self.prefetch, "use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer."""

    name: str = leaf("adamw", "refused")
    """adamw (fused), sgd, or your own as module:Class (called with groups, lr, weight_decay)."""
    lr: float = leaf(3e-3, "announced")
    """Peak learning rate."""
    weight_decay: float = leaf(0.01, "announced")
    """Decay of weights; biases and norms (parameters of fewer than 2 dimensions) have none."""
    betas: tuple[float, float] = leaf((0.9, 0.999), "announced")
    """AdamW: decay rates of the two moments."""
    eps: float = leaf(1e-8, "announced")
    """AdamW: added to the denominator."""
    momentum: float = leaf(0.9, "announced")
    """SGD: momentum."""
    nesterov: OnOff = leaf("off", "announced")
    """SGD: Nesterov's momentum."""

    def __post_init__(self) -> None:
        _check(self.name in ("adamw", "sgd") or ":" in self.name, "optim.name", self.name,
               "use adamw, sgd, or your own as module:Class.")
        _check(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "use a rate above 0.")
        _check(self.weight_decay >= 0, "optim.weight-decay", self.weight_decay, "use 0 or more.")
        _check(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas,
               "each lies from 0 up to, not including, 1.")
        _check(self.eps > 0, "optim.eps", self.eps, "use a number above 0.")
        _check(0 <= self.momentum < 1, "optim.momentum", self.momentum,
               "it lies from 0 up to, not including, 1.")
        _check(self.nesterov == "off" or self.momentum > 0, "optim.nesterov", self.nesterov,
               "it needs --optim.momentum above 0.")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the optimizer steps."""

    name: Literal["cosine", "constant"] = leaf("cosine", "announced")
    """After the warm-up: cosine down to min-ratio, or constant."""
    warmup: Length = leaf(Length(5, "percent"), "announced")
    """Linear rise to the peak, the first update at peak / warm-up steps (never zero)."""
    min_ratio: float = leaf(0.1, "announced")
    """Cosine: the last update's rate as a part of the peak."""

    def __post_init__(self) -> None:
        _check(0 <= self.min_ratio <= 1, "schedule.min-ratio", self.min_ratio,
               "it lies from 0 to 1.")


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Gradient clipping, once per optimizer step, on the mean gradient of the global batch."""

    norm: float = leaf(1.0, "announced")
    """Largest global norm; 0 is off."""
    value: float = leaf(0.0, "announced")
    """Largest absolute value of an element; 0 is off. Used instead of the norm."""

    def __post_init__(self) -> None:
        _check(self.norm >= 0, "clip.norm", self.norm, "use 0 (off) or more.")
        _check(self.value >= 0, "clip.value", self.value, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats, compilation, memory layout."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = leaf("auto", "announced")
    """auto: bf16 autocast on CUDA with bf16 units, else fp32. fp16 uses a gradient scaler."""
    compile: Literal["auto", "on", "off"] = leaf("auto", "announced")
    """torch.compile; auto: on CUDA only."""
    channels_last: Literal["auto", "on", "off"] = leaf("auto", "announced")
    """Memory layout of conv nets; auto: on where the model has 2-D convolutions."""
    loss_scale: float = leaf(65536.0, "announced")
    """fp16: initial scale of the loss."""

    def __post_init__(self) -> None:
        _check(self.loss_scale > 0, "precision.loss-scale", self.loss_scale, "use more than 0.")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Several ranks."""

    sync_bn: Literal["auto", "off"] = leaf("auto", "announced")
    """BatchNorm statistics over all ranks; auto: where there are several."""
    find_unused: OnOff = leaf("off", "announced")
    """Allow trainable parameters that some batches don't use (DDP's find_unused_parameters)."""
    bucket_mb: float = leaf(25.0, "announced")
    """Size of the buckets in which gradients are all-reduced, in MiB."""

    def __post_init__(self) -> None:
        _check(self.bucket_mb > 0, "parallel.bucket-mb", self.bucket_mb, "use more than 0.")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The process group."""

    timeout_s: float = leaf(60.0, "free")
    """Seconds that a collective may take before the rank counts as lost."""
    threads: int | Literal["auto"] = leaf("auto", "announced")
    """Threads of a rank's computation; auto: cores / ranks on this machine. It moves bits."""

    def __post_init__(self) -> None:
        _check(self.timeout_s > 0, "world.timeout-s", self.timeout_s, "use more than 0.")
        _check(self.threads == "auto" or self.threads >= 1, "world.threads", self.threads,
               "use auto, 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
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
        _check(self.keep >= 1, "checkpoint.keep", self.keep,
               "use 1 or more: the newest checkpoint is what a restart continues from.")
        _check(self.every_s >= 0, "checkpoint.every-s", self.every_s, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Eval:
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

    def __post_init__(self) -> None:
        _check(self.patience >= 0, "eval.patience", self.patience, "use 0 (off) or more.")
        _check(self.batch_size == "auto" or self.batch_size >= 1, "eval.batch-size",
               self.batch_size, "use auto, 1 or more.")
        _check(self.best == "auto" or self.best.endswith((":max", ":min")), "eval.best", self.best,
               "write NAME:max or NAME:min, such as val_loss:min.")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stopping on request (SIGTERM, SIGINT, SIGHUP, SIGUSR1)."""

    grace_s: float = leaf(30.0, "free")
    """Seconds within which the state is saved and the run has ended."""

    def __post_init__(self) -> None:
        _check(self.grace_s > 0, "stop.grace-s", self.grace_s, "use more than 0.")


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The watchdog: a run that doesn't get on is ended, so that it is started again."""

    limit_s: float | Literal["auto"] = leaf("auto", "free")
    """Seconds without a sign of life inside a step after which a rank counts as stuck; auto: 10
    times the longest recent pause, at least 30; inf: never. Twice that in validation and saving,
    minutes at the start; a rank that computes or reads isn't stuck."""

    def __post_init__(self) -> None:
        _check(self.limit_s == "auto" or self.limit_s > 0, "watchdog.limit-s", self.limit_s,
               "use auto or more than 0.")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What the bits of the result depend on."""

    deterministic: OnOff = leaf("on", "announced")
    """Deterministic kernels: exact restarts on CUDA; off buys speed there."""


@dataclass(frozen=True, kw_only=True)
class Logging:
    """What is shown."""

    every: Length = leaf(Length(50), "free")
    """Interval of console lines and TensorBoard scalars; metrics.jsonl has each step."""
    level: Literal["debug", "info", "warning", "error"] = leaf("info", "free")
    """Least level of console lines."""


@dataclass(frozen=True, kw_only=True)
class Config(Generic[TaskT]):
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
    accept: tuple[str, ...] = leaf((), "free")
    """Changed keys (batch.global-size, data, …) that a resumed run is to accept all the same."""
    inject: tuple[str, ...] = leaf((), "free")
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
    watchdog: Watch = Watch()
    numerics: Numerics = Numerics()
    log: Logging = Logging()

    def __post_init__(self) -> None:
        _check(self.steps is None or self.steps >= 1, "steps", self.steps, "use 1 or more.")
        _check(self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "use 1 or more.")
        _check(0 <= self.seed < 2**63, "seed", self.seed, "use a number from 0 to 2^63 - 1.")
        for text in self.inject:
            faults.parse(text)
        known = {name for name, _, change in self.leaves() if change == "refused"} | {"data"}
        for name in self.accept:
            _check(name.replace("-", "_") in known or name.startswith("task."), "accept", name,
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
