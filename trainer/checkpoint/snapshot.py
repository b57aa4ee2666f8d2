"""Copy the training state to host memory at a step boundary."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from trainer.distributed.torch_private import version

SMALL = 1 << 16
"""Tensors up to this many bytes are copied at once: another thread would cost about as much."""


class Snapshot:
    """Copies of tensors in reused buffers of the same memory layout, pinned for GPU tensors."""

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._deferred: list[tuple[Tensor, Tensor, int]] = []

    def take(
        self, live: Mapping[str, Mapping[str, Tensor]], *, later: Container[int] = (),
        pin: bool = True,
    ) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors; the copies of GPU tensors are complete on return.

        Args:
            live: file name → tensor name → tensor.
            later: addresses (`data_ptr`) of tensors that don't change until `finish`, which copies
                the large ones on the CPU.
            pin: pin new buffers for GPU tensors. This may wait for all work queued on the GPU.
        """
        assert not self._deferred, "finish() must be called before the next take()"
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for file, tensors in live.items():
            kept = self._buffers.setdefault(file, {})
            for gone in kept.keys() - tensors.keys():
                del kept[gone]
            for name, tensor in tensors.items():
                if name not in kept or not _fits(kept[name], tensor):
                    kept[name] = _buffer_for(tensor, pin)
                source, target = tensor.detach(), kept[name]
                if tensor.data_ptr() in later and _is_plain_memory(source, target):
                    self._deferred.append((source, target, version(source)))
                else:
                    sources.append(source)
                    targets.append(target)
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=True)
        if any(s.is_cuda for s in sources):
            torch.cuda.current_stream().synchronize()
        return {file: {n: kept[n] for n in live[file]} for file, kept in self._buffers.items()}

    def finish(self) -> bool:
        """Copy the tensors that `take` has left, by memmove: torch's copy would take threads from
        the training. Returns whether they are unchanged since `take`, by torch's version counters.
        """
        deferred, self._deferred = self._deferred, []
        for source, target, _ in deferred:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return all(version(source) == before for source, _, before in deferred)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _buffer_for(tensor: Tensor, pin: bool) -> Tensor:
    if pin and tensor.device.type == "cuda":
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _is_plain_memory(source: Tensor, target: Tensor) -> bool:
    """Whether the copy is one block copy on the CPU, and large enough for another thread."""
    dense = source.is_contiguous() or (
        source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last))
    return (dense and source.device.type == "cpu" and source.stride() == target.stride()
            and source.nbytes > SMALL)
