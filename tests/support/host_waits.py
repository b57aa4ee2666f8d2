"""Runs code on fake CUDA tensors, without a GPU, and lists where the host would wait for one."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.distributed.waits import WaitsFor, waits_for

ROOT = f"{Path(__file__).parents[2]}/"
UNORDERED = {f"aten::{name}" for name in (
    "nll_loss2d_forward", "cumsum", "bincount", "histc", "kthvalue", "_adaptive_avg_pool2d",
    "adaptive_max_pool2d", "avg_pool3d", "max_pool3d_with_indices", "fractional_max_pool2d",
    "reflection_pad1d", "reflection_pad2d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_embedding_bag")}
"""Operations that raise for floats on CUDA under `use_deterministic_algorithms`, or in backward."""
READS = {f"aten::{name}": value for name, value in {
    "_local_scalar_dense": None, "equal": True, "nonzero": None, "masked_select": None,
    "_unique2": None, "bincount": None, "repeat_interleave": None}.items()}
"""Operations whose result, or its shape, the host reads from the device."""


class HostWaits(TorchDispatchMode):
    """Records each operation for which the host waits: (file:function of the innermost frame of the
    project, or else of torch; why; whether it is marked). What it would read is 0.5, 1 or True."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, bool]] = []
        self.unordered: list[str] = []
        """Operations without a deterministic kernel."""

    def note(self, why: str) -> None:
        frames = [f for f in traceback.extract_stack()[:-1] if f.filename != __file__]
        own = [f for f in frames if f.filename.startswith((f"{ROOT}trainer/", f"{ROOT}tests/"))
               and f.name != "waits_in"]
        frame = (own or frames)[-1]
        marked = waits_for(threading.get_ident(), sys._getframe()) is WaitsFor.DEVICE
        self.found.append((f"{frame.filename.removeprefix(ROOT)}:{frame.name}", why, marked))

    def places(self) -> list[str]:
        return [place for place, *_ in self.found]

    def unmarked(self) -> list[str]:
        """Those that are not marked as a wait for the device: with a kernel that never ends, the
        watchdog would take the host for busy."""
        return [place for place, _, marked in self.found if not marked]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in UNORDERED and any(t.is_cuda and t.is_floating_point() for t in tensors):
            self.unordered.append(name)
        if name in READS and any(t.is_cuda for t in tensors):
            self.note(name)
        if name == "aten::_local_scalar_dense":
            return 0.5 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if READS.get(name) is not None:
            return READS[name]
        if name == "aten::_to_copy" and not kwargs.get("non_blocking"):
            self._note_copy(args[0].device, kwargs.get("device") or args[0].device)
        if name == "aten::copy_" and not (len(args) > 2 and args[2]) and args[1].dim():
            self._note_copy(args[1].device, args[0].device)
        if name in ("aten::index", "aten::index_put_", "aten::index_put") and args[0].is_cuda:
            for index in (i for i in args[1] if i is not None):
                if index.dtype == torch.bool or not index.is_cuda:
                    self.note(f"an index of {index.dtype} on {index.device.type}")
        return func(*args, **kwargs)

    def _note_copy(self, source: torch.device, target: torch.device) -> None:
        if {source.type, torch.device(target).type} == {"cpu", "cuda"}:
            self.note(f"copy from {source.type} to {torch.device(target).type}")


class _Calls(TorchFunctionMode):
    """What no fake tensor can do: `backward` gives each leaf of the loss a gradient, `data_ptr` is
    a number for each place, and memory is pinned without a GPU."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return _fill_gradients(args[0].grad_fn)
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage()._cdata * 2**32 + args[0].storage_offset()
        if func in (torch.tensor, torch.as_tensor) and (
                torch.device(kwargs.get("device") or "cpu").type == "cuda"):
            self._waits.note("copy of Python values")
            return torch.empty(torch.tensor(args[0]).shape, **kwargs)
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _fill_gradients(node: Any) -> None:
    """Run the hooks of the leaves below a node of the graph, each after its gradient is there."""
    nodes = [node]
    for one in nodes:
        nodes += [n for n, _ in one.next_functions if n is not None and n not in nodes]
    for leaf in (n.variable for n in nodes if hasattr(n, "variable")):
        if leaf.grad is None:
            leaf.grad = torch.empty_like(leaf)
        for hook in (leaf._post_accumulate_grad_hooks or {}).values():
            hook(leaf)


def _tolist(waits: HostWaits, read: Callable[[int], list[float]], tensor: Tensor) -> Any:
    if tensor.is_cuda:
        waits.note("tolist")
    if tensor.dim() < 2:
        return read(tensor.numel()) if tensor.dim() else read(1)[0]
    return [_tolist(waits, read, row) for row in tensor.unbind()]


def _per_channel(value: Tensor | None, like: Tensor, default: float) -> Tensor | float:
    return default if value is None else value.reshape(-1, *[1] * (like.dim() - 2))


def _elemt(x, weight, bias, mean, scale, eps):
    y = (x.to(mean.dtype) - _per_channel(mean, x, 0)) * _per_channel(scale, x, 1)
    return (y * _per_channel(weight, x, 1) + _per_channel(bias, x, 0)).to(x.dtype)


def _backward_reduce(g, x, mean, scale, weight, *needs):
    g, axes = g.to(mean.dtype), [i for i in range(x.dim()) if i != 1]
    sum_g, sum_gx = g.sum(axes), (g * (x - _per_channel(mean, x, 0))).sum(axes)
    return sum_g, sum_gx, sum_gx * scale, sum_g.clone()


def _backward_elemt(g, x, mean, scale, weight, sum_g, sum_gx, count):
    mean_g, mean_gx = (_per_channel(t / count.sum(), x, 0) for t in (sum_g, sum_gx))
    centred, scale = x - _per_channel(mean, x, 0), _per_channel(scale, x, 1)
    gradient = (g - mean_g - centred * scale.square() * mean_gx) * scale
    return (gradient * _per_channel(weight, x, 1)).to(x.dtype)


def _update_stats(x, mean, variance, momentum):
    values = x.transpose(0, 1).flatten(1)
    return values.mean(1), values.var(1, correction=0)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An update in place, of tensors without values."""


@contextlib.contextmanager
def emulated(key: str) -> Iterator[None]:
    """Context in which CUDA kernels that torch defines for no other device exist for a dispatch
    key: those of batch norms by their definitions."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in (
                ("batch_norm_elemt", _elemt), ("batch_norm_backward_reduce", _backward_reduce),
                ("batch_norm_backward_elemt", _backward_elemt),
                *([("batch_norm_update_stats", _update_stats), ("_fused_sgd_", _nothing)]
                  if key == "Meta" else [])):
            library.impl(name, function, key)
        yield


def _event(waits: HostWaits) -> Any:
    return SimpleNamespace(
        record=lambda *_: None, wait=lambda *_: None, query=lambda: True,
        synchronize=lambda: waits.note("synchronize"), elapsed_time=lambda _: 1.0)


def _stream(waits: HostWaits) -> Any:
    return SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None,
                           synchronize=lambda: waits.note("synchronize"))


@contextlib.contextmanager
def waits_in(read: Callable[[int], list[float]] = lambda size: [1.0] * size
             ) -> Iterator[HostWaits]:
    """Context in which new tensors on "cuda" are fake ones, and waits are recorded.

    Args:
        read: returns the numbers, of so many, that the host reads from a vector on the device.
    """
    waits = HostWaits()
    with (FakeTensorMode(allow_non_fake_inputs=True), waits, _Calls(waits),
          mock.patch.object(FakeTensor, "tolist", lambda tensor: _tolist(waits, read, tensor)),
          mock.patch("torch.cuda.Event", side_effect=lambda **_: _event(waits)),
          mock.patch("torch.cuda.Stream", side_effect=lambda *_: _stream(waits)),
          mock.patch("torch.cuda.current_stream", side_effect=lambda *_: _stream(waits)),
          mock.patch("torch.cuda.stream", side_effect=lambda _: contextlib.nullcontext()),
          mock.patch("torch.cuda.synchronize", side_effect=lambda *_: waits.note("synchronize")),
          mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
          mock.patch("trainer.rng.preserved", contextlib.nullcontext)):
        yield waits
