"""Copy the training state to host memory at a step boundary."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Snapshot:
    """Copies of tensors in reused buffers of the same memory layout, pinned for GPU tensors."""

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, Tensor]] = {}

    def take(
        self, live: Mapping[str, Mapping[str, Tensor]], *, pin: bool = True
    ) -> dict[str, dict[str, Tensor]]:
        """Copy tensors, by file and name; the copies are complete on return.

        Args:
            pin: pin new buffers for GPU tensors. This may wait for all work queued on the GPU.
        """
        before = self._copies
        self._copies = {
            file: {name: _buffer_for(tensor, before.get(file, {}).get(name), pin)
                   for name, tensor in tensors.items()}
            for file, tensors in live.items()}
        sources = [t.detach() for tensors in live.values() for t in tensors.values()]
        targets = [t for tensors in self._copies.values() for t in tensors.values()]
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return self._copies


def _buffer_for(tensor: Tensor, used: Tensor | None, pin: bool) -> Tensor:
    if used is not None and used.shape == tensor.shape and used.dtype == tensor.dtype:
        return used
    return torch.empty_like(tensor, device="cpu", pin_memory=pin and tensor.is_cuda)
