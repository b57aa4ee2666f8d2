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
from trainer.distributed.waits import WaitsFor, waiting_for

IGNORED_OPERATIONS = ("empty", "resize", "c10d")
"""Parts of names of operations that return uninitialised memory or values of other ranks."""


@dataclass(frozen=True)
class Origin:
    """The operation that created a NaN."""

    phase: str  # "forward" or "backward"
    module: str | None  # name of the module; "" for the model itself, None outside of the model
    operation: str  # such as aten.log.default
    node: str = ""  # autograd node in backward, such as LogBackward0

    def __str__(self) -> str:
        where = ("the loss, outside the model" if self.module is None
                 else f"module {self.module or '(the model itself)'}")
        return f"{self.operation} in the {self.phase} of {where}" + (
            f" ({self.node})" if self.node else "")


class _NanMode(TorchDispatchMode):
    """Reports the first operation that creates a NaN from inputs without one. What a device has
    found is read by `finish`: an operation does not wait for it.

    Args:
        origin: of the operation with this name, which runs now.
    """

    def __init__(self, origin: Callable[[str], Origin], report: Callable[[Origin], None]) -> None:
        super().__init__()
        self._origin, self._report, self._reported = origin, report, False
        self._on_device: list[tuple[Origin, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._reported or _has_nan((args, kwargs))
        out = func(*args, **kwargs)
        if before is True or any(word in str(func) for word in IGNORED_OPERATIONS):
            return out
        after = _has_nan(out)
        if after is False:
            return out
        made = after & ~before if isinstance(before, Tensor) else after
        if isinstance(made, Tensor):
            self._on_device.append((self._origin(str(func)), made))
        else:
            self.finish()  # an earlier operation on the device comes first
            self._report_once(self._origin(str(func)))
        return out

    def finish(self) -> None:
        """Report what a device has found; the host waits for it."""
        found, self._on_device = self._on_device, []
        with waiting_for(WaitsFor.DEVICE):
            flags = torch.stack([made for _, made in found]).tolist() if found else []
        for (origin, _), flag in zip(found, flags, strict=True):
            if flag:
                return self._report_once(origin)

    def _report_once(self, origin: Origin) -> None:
        if not self._reported:
            self._reported = True
            self._report(origin)


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
    tracker = ModuleTracker()

    def find_origin(operation: str) -> Origin:
        inside = [n for n in tracker.parents if n == root or n.startswith(root + ".")]
        module = max(inside, key=len).removeprefix(root).removeprefix(".") if inside else None
        return (Origin("backward", module, operation, autograd_node()) if tracker.is_bw
                else Origin("forward", module, operation))

    mode = _NanMode(find_origin, report)
    try:
        with tracker, mode:
            yield
    finally:
        mode.finish()


def _has_nan(values: Any) -> bool | Tensor:
    """Whether a tensor has a NaN; a tensor if only a device knows, for which nobody has waited."""
    flags = [torch.isnan(value).any() for value in tree_leaves(values)
             if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
             and value.layout == torch.strided]
    if any(flag for flag in flags if flag.is_cpu):
        return True
    on_device = [flag for flag in flags if not flag.is_cpu]
    return torch.stack(on_device).any() if on_device else False
