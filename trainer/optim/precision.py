"""Precision policy: autocast, gradient scaler, compilation, memory format, determinism."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.schema import Numerics, Precision
from trainer.distributed import torch_private
from trainer.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Precision settings with `auto` resolved for the device and the model."""

    dtype: torch.dtype
    compile: bool
    channels_last: bool
    mode: str | None = None
    """The mode of `torch.compile`; None: its default."""

    def __str__(self) -> str:
        names = {dtype: name for name, dtype in DTYPES.items()}
        return (names[self.dtype] + (" compiled" if self.compile else " eager") + (
            f" ({self.mode})" if self.mode else "")
                + " channels_last" * self.channels_last)


def unwrap(model: nn.Module) -> nn.Module:
    """Remove wrappers of torch.compile and DataParallel from a model and its submodules, whose
    prefixes would appear in a checkpoint. Compiled modules stay compiled, under their own name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError("--task: model() returns or contains a DistributedDataParallel; "
                              "return the plain model: the trainer wraps it.")
        parent, _, name = path.rpartition(".")
        if path and (inner := _unwrapped(module)) is not module:
            setattr(modules[parent], name, inner)
    return _unwrapped(model)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = (module.module if isinstance(module, nn.DataParallel)
             else torch_private.without_compile_wrapper(module))
    return module if inner is module else _unwrapped(inner)


def resolve(config: Precision, model: nn.Module, device: torch.device, *, eager: bool = False
            ) -> PrecisionPolicy:
    """Resolve `auto`: bf16 and compilation on CUDA with bf16 units; fp32 and eager on CPU, where
    autocast and compilation are slower. `eager` disables any compilation."""
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = DTYPES[config.dtype if config.dtype != "auto" else "bf16" if bf16 else "fp32"]
    if dtype is torch.float16 and device.type == "mps":
        raise ConfigError("--precision.dtype fp16: torch has no gradient scaler for mps; use bf16 "
                          "or fp32.")
    compiled = device.type == "cuda" if config.compile == "auto" else config.compile != "off"
    mode = None if eager or config.compile in ("auto", "on", "off") else config.compile
    convolutional = any(isinstance(m, nn.Conv2d) for m in model.modules())
    return PrecisionPolicy(
        dtype=dtype, compile=compiled and not eager, mode=mode,
        channels_last=(convolutional if config.channels_last == "auto"
                       else config.channels_last == "on"))


def place(model: nn.Module, choice: PrecisionPolicy, device: torch.device) -> nn.Module:
    """Move a model to its device, in its memory format, which decides the last bits of outputs."""
    layout = torch.channels_last if choice.channels_last else torch.preserve_format
    return model.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def compile_model(model: nn.Module, choice: PrecisionPolicy, numerics: Numerics) -> None:
    """Let a model compile itself in its first call, if it is to be compiled. Its names stay plain.

    A deterministic run compiles for each size separately: after a second size, torch would generate
    code for any size, which rounds differently, and a restart has seen only one.
    """
    if choice.compile:
        model.compile(dynamic=False if numerics.deterministic == "on" else None, mode=choice.mode)


def autocast(choice: PrecisionPolicy, device: torch.device
             ) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a factory of contexts for the forward: autocast, or no operation in fp32."""
    if choice.dtype is torch.float32:
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=choice.dtype)


def set_determinism(deterministic: bool) -> None:
    """Select deterministic kernels or the fastest ones. Call it before the first kernel runs, and
    before the process groups are made: torch then excludes NCCL's algorithm NVLS, whose sums differ
    from call to call (pytorch #156381)."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling fresh memory only helps to find reads of it: it costs time, changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 for fp32 products on CUDA. (Torch's default differs by operation.)

    Torch itself reads the older settings; if user code has used the newer ones (`fp32_precision`),
    only these forbid TF32 in convolutions.
    """
    cudnn: Any = torch.backends.cudnn
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cudnn.allow_tf32 = allowed
    for operation in (cudnn.conv, cudnn.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"


@contextlib.contextmanager
def tf32_restored() -> Iterator[None]:
    """Restore the settings of TF32 at the end of the context."""
    cudnn: Any = torch.backends.cudnn
    operations, older = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn), None
    newer = [operation.fp32_precision for operation in operations]
    with contextlib.suppress(RuntimeError):  # raised if user code has used the newer ones
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        for operation, value in zip(operations, newer, strict=True):
            operation.fp32_precision = value
