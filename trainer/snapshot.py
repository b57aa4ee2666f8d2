"""A copy of the state at a step boundary, in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Mapping

import torch
from torch import Tensor

SMALL = 1 << 16
"""Bytes up to which a copy is made at once: handing it to another thread costs about as much."""


class Snapshot:
    """Copies of tensors in buffers that are used again: pinned where they come from a GPU.

    A copy keeps the layout of its tensor, so that taking it is a plain memory copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}
        self._left: list[tuple[Tensor, Tensor, int]] = []

    def take(
        self, live: Mapping[str, Mapping[str, Tensor]], *, later: Container[int] = (),
        pin: bool = True,
    ) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors as they are now; on CUDA the copies are complete on return.

        Args:
            live: file name → tensor name → tensor.
            later: addresses (`data_ptr`) of tensors that stay as they are for a while. Large ones
                on the CPU may be left for `finish`.
            pin: whether new buffers for a GPU's tensors are pinned; to make such memory may wait
                for all that the GPU is at.
        """
        assert not self._left, "the copy before was not finished"
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
                    self._left.append((source, target, source._version))
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
        """Copy what `take` has left, in this thread alone: torch's own threads are computing.

        Returns:
            Whether it was still as `take` has found it, as far as torch counts changes.
        """
        left, self._left = self._left, []
        for source, target, _ in left:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return all(source._version == version for source, _, version in left)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _buffer_for(tensor: Tensor, pin: bool) -> Tensor:
    if pin and tensor.device.type == "cuda":
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def _is_plain_memory(source: Tensor, target: Tensor) -> bool:
    """Whether copying is moving the bytes of one block of memory, and worth another thread."""
    dense = source.is_contiguous() or (
        source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last))
    return (dense and source.device.type == "cpu" and source.stride() == target.stride()
            and source.nbytes > SMALL)
