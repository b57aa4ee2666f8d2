"""Number formats: autocast, the gradient scaler, compilation, memory layout, determinism."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Precision
from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `auto` came to on this device for this model."""

    dtype: torch.dtype
    compile: bool
    channels_last: bool

    def __str__(self) -> str:
        name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        return " ".join([
            name,
            "compiled" if self.compile else "eager",
            *(["channels_last"] if self.channels_last else []),
        ])  # fmt: skip


def plain(model: nn.Module) -> nn.Module:
    """A model without the wrappers of torch.compile and DataParallel around it or parts of it,
    whose names a checkpoint would have. What was to be compiled is, under its own name.

    Raises:
        ConfigError: it is wrapped in DDP.
    """
    for parent in list(model.modules()):
        if isinstance(parent, DistributedDataParallel):
            raise ConfigError("--task: model() returns a DistributedDataParallel, or has one in "
                              "it; return the plain model: the trainer wraps it itself.")
        for name, child in list(parent._modules.items()):
            if child is not None and (inner := _unwrapped(child)) is not child:
                setattr(parent, name, inner)
    return _unwrapped(model)


def _unwrapped(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.DataParallel):
        return _unwrapped(module.module)
    inner = getattr(module, "_orig_mod", None)  # of torch.compile
    if inner is None:
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # type: ignore[operator]
    return _unwrapped(inner)


def choose(
    config: Precision, model: nn.Module, device: torch.device, *, eager: bool = False
) -> Choice:
    """Resolve `auto`: CUDA with bf16 units computes in bf16, compiled; a CPU in fp32, eagerly
    (without bf16 units autocast and compile are slower there). An explicit value is obeyed, but
    for compilation where it has to be `eager`."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if config.dtype == "auto":
        bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if bf16 else torch.float32
    else:
        dtype = dtypes[config.dtype]
    if dtype is torch.float16 and device.type == "mps":
        raise ConfigError("--precision.dtype fp16: there is no gradient scaler on mps; use bf16 "
                          "or fp32.")
    convolutional = any(isinstance(m, nn.Conv2d) for m in model.modules())
    return Choice(
        dtype=dtype,
        compile=not eager and (
            device.type == "cuda" if config.compile == "auto" else config.compile == "on"),
        channels_last=(
            convolutional if config.channels_last == "auto" else config.channels_last == "on"
        ),
    )


def autocast(
    choice: Choice, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes the context for a forward: autocast, or nothing in fp32."""
    if choice.dtype is torch.float32:
        nothing = contextlib.nullcontext()
        return lambda: nothing
    return partial(torch.autocast, device.type, dtype=choice.dtype)


def scaler(choice: Choice, device: torch.device, initial: float) -> torch.amp.GradScaler:
    """The gradient scaler of fp16; a disabled one otherwise."""
    return torch.amp.GradScaler(
        device.type, enabled=choice.dtype is torch.float16, init_scale=initial
    )


def set_determinism(deterministic: bool, device: torch.device) -> None:
    """Deterministic kernels, or the fastest ones. Before the first kernel runs."""
    if deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory is for finding reads of it; it costs and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def set_tf32(allowed: bool) -> None:
    """Whether CUDA may compute products of fp32 numbers in TF32; torch's own default is a mix."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
