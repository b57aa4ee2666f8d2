"""Memory use of a rank in MiB: parameters, optimizer state, activations, peak."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim.adamw import AdamW

MIB = 2**20


def memory_figures(
    model: nn.Module, optimizer: torch.optim.Optimizer, activations_mb: float | None
) -> dict[str, Any]:
    """Fields for summary.json. `peak_mb` is of the device on CUDA, else of the process."""
    return {
        "parameters_mb": round(_size(model.parameters()), 3),
        "optimizer_mb": _rounded(optimizer_mb(optimizer)),
        "activations_mb": _rounded(activations_mb),
        "peak_mb": round(peak_mb(), 1),
    }


def summary_line(
    model: nn.Module, optimizer: torch.optim.Optimizer, activations_mb: float | None
) -> str:
    """The console line before the first step."""
    figures = memory_figures(model, optimizer, activations_mb)
    known = [f"{name} {_text(figures[key])} MiB" for name, key in (
        ("parameters", "parameters_mb"), ("optimizer", "optimizer_mb"),
        ("activations of a micro-batch", "activations_mb"), ("peak so far", "peak_mb"),
    ) if figures[key] is not None]  # fmt: skip
    return "memory: " + ", ".join(known)


def optimizer_mb(optimizer: torch.optim.Optimizer) -> float | None:
    """Size of the optimizer's state in MiB.

    Before the first update, which allocates the state, this is the future size for AdamW and SGD,
    and None for other optimizers.
    """
    tensors = [v for entries in optimizer.state.values() for v in entries.values()
               if isinstance(v, Tensor)]
    if tensors:
        return _size(tensors)
    group = optimizer.param_groups[0]
    copies = {AdamW: 2, torch.optim.AdamW: 2, torch.optim.SGD: int(bool(group.get("momentum")))}
    if type(optimizer) not in copies:
        return None
    return copies[type(optimizer)] * _size(p for g in optimizer.param_groups for p in g["params"])


def peak_mb() -> float:
    """Peak memory in MiB: torch's tensors on the CUDA device, or this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def activations(
    model: nn.Module, forward_backward: Callable[[], None], undo: Callable[[], None]
) -> float | None:
    """Run a forward and backward, and measure the memory saved between them, in MiB.

    On CUDA this is the allocator's peak minus the memory used before and the gradients. On a CPU it
    is the largest size of the tensors saved for the backward at one time, without parameters.
    Compiled code is not measured on a CPU, since it would be compiled again without the hooks.

    Args:
        undo: undoes a forward that doesn't support saved tensor hooks, such as `torch.func`; the
            forward is then run again without them.

    Returns:
        None if it can't be measured.
    """
    if any(p.is_cuda for p in model.parameters()):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward_backward()
        gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
        return max(0.0, (torch.cuda.max_memory_allocated() - before) / MIB - gradients)
    if any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod")
           for m in model.modules()):
        forward_backward()
        return None
    saved = _SavedBytes({t.untyped_storage().data_ptr() for t in model.parameters()})
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, _SavedTensor.get):
            forward_backward()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        undo()
        forward_backward()
        return None
    return saved.most / MIB


class _SavedBytes:
    """Counts the bytes saved for a backward, each storage once, and their maximum."""

    def __init__(self, others: set[int]) -> None:
        self.now = self.most = 0
        self._others, self._users = others, Counter[int]()

    def pack(self, tensor: Tensor) -> _SavedTensor:
        return _SavedTensor(self, tensor)

    def add(self, memory: torch.UntypedStorage, sign: int) -> None:
        at = memory.data_ptr()
        if at in self._others or not at:
            return
        self._users[at] += sign
        if self._users[at] == (sign > 0):  # its first user, or the end of its last user
            self.now += sign * memory.nbytes()
            self.most = max(self.most, self.now)


class _SavedTensor:
    """A saved tensor; counted until the autograd graph releases it."""

    def __init__(self, saved: _SavedBytes, tensor: Tensor) -> None:
        self._saved, self._tensor = saved, tensor
        self._memory = tensor.untyped_storage() if tensor.layout == torch.strided else None
        if self._memory is not None:
            saved.add(self._memory, 1)

    def get(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None:
            self._saved.add(memory, -1)


def _size(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / MIB


def _text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
