"""NaN detection: check every operation of a step, and name the first one that creates a NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from trainer.distributed.torch_private import TorchDispatchMode, autograd_node, tree_leaves

IGNORED_OPERATIONS = ("empty", "resize", "c10d")
"""Parts of names of operations that return uninitialised memory or values of other ranks."""


@dataclass(frozen=True)
class Origin:
    """The operation that created a NaN."""

    phase: str
    """"forward" or "backward"."""
    module: str | None
    """Name of the module; "" for the model itself, None outside of the model."""
    operation: str
    """Such as aten.log.default."""
    node: str = ""
    """Autograd node in backward, such as LogBackward0."""

    def __str__(self) -> str:
        where = ("the loss, outside the model" if self.module is None
                 else f"module {self.module or '(the model itself)'}")
        return f"{self.operation} in the {self.phase} of {where}" + (
            f" ({self.node})" if self.node else "")


class _NanMode(TorchDispatchMode):
    """Calls `on_nan` with the name of each operation that creates a NaN from inputs without one."""

    def __init__(self, on_nan: Callable[[str], None]) -> None:
        super().__init__()
        self._on_nan = on_nan

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        clean = not _has_nan((args, kwargs))
        out = func(*args, **kwargs)
        if clean and not any(word in str(func) for word in IGNORED_OPERATIONS) and _has_nan(out):
            self._on_nan(str(func))
        return out


@contextlib.contextmanager
def nan_detector(wrapped: nn.Module, model: nn.Module, report: Callable[[Origin], None]
                 ) -> Iterator[None]:
    """Report the first operation that creates a NaN in the forward and backward of `wrapped`, which
    contains `model`.

    `torch.autograd.detect_anomaly` checks the backward only, and raises on one rank while the
    others wait for it. Here the step continues, and all ranks skip its update.
    """
    path = next(n for n, m in wrapped.named_modules() if m is model)
    root = f"{type(wrapped).__name__}.{path}" if path else type(wrapped).__name__
    tracker, reported = ModuleTracker(), False

    def on_nan(operation: str) -> None:
        nonlocal reported
        if reported:
            return
        reported = True
        inside = [n for n in tracker.parents if n == root or n.startswith(root + ".")]
        module = max(inside, key=len).removeprefix(root).removeprefix(".") if inside else None
        report(Origin("backward", module, operation, autograd_node()) if tracker.is_bw
               else Origin("forward", module, operation))

    with tracker, _NanMode(on_nan):
        yield


def _has_nan(values: Any) -> bool:
    return any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        and value.layout == torch.strided and bool(torch.isnan(value).any())
        for value in tree_leaves(values)
    )
