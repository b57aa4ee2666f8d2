"""A copy of the state at a step boundary, in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors in buffers that are used again: pinned where they come from a GPU.

    A copy keeps the layout of its tensor, so that taking it is a plain memory copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, dict[str, Tensor]] = {}

    def take(self, live: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors as they are now; on CUDA the copies are complete on return."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for file, tensors in live.items():
            kept = self._buffers.setdefault(file, {})
            for gone in kept.keys() - tensors.keys():
                del kept[gone]
            for name, tensor in tensors.items():
                if name not in kept or not _fits(kept[name], tensor):
                    kept[name] = _buffer_for(tensor)
                sources.append(tensor.detach())
                targets.append(kept[name])
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if any(s.is_cuda for s in sources):
            torch.cuda.current_stream().synchronize()
        return {file: {n: kept[n] for n in live[file]} for file, kept in self._buffers.items()}


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _buffer_for(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cuda":
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")
