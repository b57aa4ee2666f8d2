"""Copy the training state to host memory at a step boundary."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

Live = Mapping[str, Mapping[str, Tensor]]
"""Tensors by file and name."""
CPU = torch.device("cpu")


class Snapshot:
    """Copies of tensors in reused host memory of the same layout.

    Those of a GPU are pinned, and a stream of their own copies while the next step computes:
    `protect` before the GPU changes the tensors, `wait` before the copies are read.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._reading: list[Tensor] = []  # keeps their memory from being reused
        self._stream = self._copied = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._copied = torch.cuda.Event(blocking=True)  # the waiting thread sleeps

    def allocate(self, live: Live) -> None:
        """Make the pinned memory for the copies of such tensors, which takes long and may wait for
        all work queued on the GPU. Without a GPU the first copy makes it."""
        if self._stream is not None:
            self._copies = self._buffers(live, pin=True)

    def take(
        self, live: Live, *, moving: Container[int] = (), pin: bool = True
    ) -> dict[str, dict[str, Tensor]]:
        """Copy tensors, by file and name. Without a GPU the copies are complete on return.

        Args:
            moving: addresses of tensors that need no `protect`: the current stream copies them.
            pin: pin new memory for tensors of a GPU, as `allocate` does.
        """
        self.protect()
        self._copies = self._buffers(live, pin=pin)
        pairs = [(copy, live[file][name].detach())
                 for file, copies in self._copies.items() for name, copy in copies.items()]
        if self._stream is None or self._copied is None:
            _copy(pairs)
            return self._copies
        _copy([pair for pair in pairs if pair[1].data_ptr() in moving], non_blocking=True)
        pairs = [pair for pair in pairs if pair[1].data_ptr() not in moving]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy(pairs, non_blocking=True)
        self._copied.record(self._stream)
        self._reading = [source for _, source in pairs]
        return self._copies

    def protect(self) -> None:
        """Let the GPU finish the copies before what is queued on the current stream from now on."""
        if self._reading and self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._reading = []

    def wait(self) -> None:
        """Wait until the last copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffers(self, live: Live, *, pin: bool) -> dict[str, dict[str, Tensor]]:
        return {file: {name: _buffer_for(tensor, self._copies.get(file, {}).get(name), pin)
                       for name, tensor in tensors.items()}
                for file, tensors in live.items()}


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], *, non_blocking: bool = False) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        targets, sources = map(list, zip(*pairs, strict=True))
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def _buffer_for(tensor: Tensor, used: Tensor | None, pin: bool) -> Tensor:
    if used is not None and used.shape == tensor.shape and used.dtype == tensor.dtype:
        return used
    return torch.empty_like(tensor, device="cpu", pin_memory=pin and tensor.is_cuda)
