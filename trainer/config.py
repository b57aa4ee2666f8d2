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
from trainer.hyperparameters import Clip, Optim, Schedule
from trainer.leaf import Change, OnOff, leaf
from trainer.leaf import check as _check
from trainer.length import Length

TaskT = TypeVar("TaskT")


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
    on_error: Literal["stop", "skip"] = leaf("stop", "free")
    """A training sample that raises: stop the run, or skip the sample: another takes its place."""

    def __post_init__(self) -> None:
        _check(self.workers == "auto" or self.workers >= 0, "data.workers", self.workers,
               "use auto, 0 or more.")
        _check(self.prefetch >= 1, "data.prefetch", self.prefetch, "use 1 or more.")


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
    recompute_every: int = leaf(0, "announced")
    """Activation checkpointing: of every n-th block the backward computes the activations anew
    instead of keeping them in memory; 0 is off."""

    def __post_init__(self) -> None:
        _check(self.recompute_every >= 0, "precision.recompute-every", self.recompute_every,
               "use 0 (off), 1 (each block) or more.")
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
    verify_every: Length = leaf(Length(100), "free")
    """Interval at which ranks compare checksums of weights and optimizer; they do so before each
    save too. off: never."""

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
    min_delta: float = leaf(0.0, "announced")
    """How much better it has to be for that, in the figure's own unit."""

    def __post_init__(self) -> None:
        _check(self.patience >= 0, "eval.patience", self.patience, "use 0 (off) or more.")
        _check(self.min_delta >= 0, "eval.min-delta", self.min_delta, "use 0 or more.")
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
class Nonfinite:
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
        _check(self.max_in_row >= 0, "nonfinite.max-in-row", self.max_in_row,
               "use 0 (never go back) or more.")
        _check(self.max_total >= 0, "nonfinite.max-total", self.max_total, "use 0 or more.")
        _check(self.spike_z >= 0, "nonfinite.spike-z", self.spike_z, "use 0 (off) or more.")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What the bits of the result depend on."""

    deterministic: OnOff = leaf("on", "announced")
    """Deterministic kernels: exact restarts on CUDA; off buys speed there."""
    tf32: OnOff = leaf("off", "announced")
    """CUDA: products of fp32 numbers in TF32, with 10 bits of mantissa, several times as fast."""
    anomaly: OnOff = leaf("off", "announced")
    """Look at the result of every operation and name the module and the operation that first make
    a NaN; many times slower, never compiled."""


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
    init: str | None = leaf(None, "refused")
    """Weights to begin with: a safetensors file, a torch checkpoint, or a folder with a
    model.safetensors; a head of another size is left as the model makes it."""
    init_strict: OnOff = leaf("on", "refused")
    """Refuse weights whose names or sizes don't fit; off: take what fits and name the rest."""
    freeze: tuple[str, ...] = leaf((), "refused")
    """PATTERN: parameters whose names match aren't trained, nor their batch norms' statistics;
    !PATTERN takes some out again, the last match counts (such as * and !fc.*)."""
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
    nonfinite: Nonfinite = Nonfinite()
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
