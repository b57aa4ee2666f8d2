"""Memory use of a rank in MiB: parameters, optimizer state, activations, peak."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim.optimizers import expected_state

MIB = 2**20


def memory_figures(
    model: nn.Module, optimizer: torch.optim.Optimizer, activations_mb: float | None
) -> dict[str, float | None]:
    """Fields for summary.json. `peak_mb` is of the device on CUDA, else of the process."""
    figures = {"parameters_mb": _size(model.parameters()), "optimizer_mb": optimizer_mb(optimizer),
               "activations_mb": activations_mb}
    rounded = {name: None if mb is None else round(mb, 3) for name, mb in figures.items()}
    return rounded | {"peak_mb": round(peak_mb(), 1)}


def summary_line(
    model: nn.Module, optimizer: torch.optim.Optimizer, activations_mb: float | None
) -> str:
    """The console line before the first step."""
    names = ("parameters", "optimizer", "activations of a micro-batch", "peak so far")
    figures = memory_figures(model, optimizer, activations_mb).values()
    return "memory: " + ", ".join(
        f"{name} {value:,.0f} MiB" if value >= 100 else f"{name} {value:.2g} MiB"
        for name, value in zip(names, figures, strict=True) if value is not None)


def optimizer_mb(optimizer: torch.optim.Optimizer) -> float | None:
    """Size of the optimizer's state in MiB; before the first update, which allocates it, that of
    AdamW and SGD, and None for others."""
    if tensors := [v for entries in optimizer.state.values() for v in entries.values()
                   if isinstance(v, Tensor)]:
        return _size(tensors)
    expected = expected_state(optimizer)
    known = expected or type(optimizer) is torch.optim.SGD
    return _size(t for likes in expected.values() for t in likes.values()) if known else None


def peak_mb() -> float:
    """Peak memory in MiB: torch's tensors on the CUDA device, or this process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def activations(model: nn.Module, forward_backward: Callable[[], Any]) -> float | None:
    """Run a forward and backward, and measure the MiB held between them: the peak of CUDA's
    allocator minus the memory used before and the gradients; None on other devices."""
    on_cuda = any(p.is_cuda for p in model.parameters())
    before = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    forward_backward()
    gradients = _size(p.grad for p in model.parameters() if p.grad is not None)
    return max(0.0, peak_mb() - before / MIB - gradients) if on_cuda else None


def _size(tensors: Iterable[Tensor]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / MIB
