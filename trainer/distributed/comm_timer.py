"""Measure how long a rank waits for the others in a step, without a collective or device sync."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.distributed import torch_private


class DeviceInterval:
    """Two events on the CUDA stream measure an interval without a device sync."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * on_cuda)]

    def first(self) -> None:
        for event in self._events[:1]:
            event.record()

    def second(self) -> None:
        for event in self._events[1:]:
            event.record()

    def between_s(self) -> float | None:
        """Seconds between the events, which the device must have passed; None except on CUDA."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else None


class CommunicationTimer:
    """Measure the time of a step that this rank waits in collectives, not hidden by computation: in
    the backward from when its gradients are ready until all are reduced (the autograd engine runs a
    callback in between, before that of the reducer), and in synchronised batch norms on a CPU."""

    def __init__(self, *, on_cuda: bool = False,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._interval, self.clock = DeviceInterval(on_cuda=on_cuda), clock
        self.reset()

    def reset(self) -> None:
        """Reset after work that is not a step."""
        self._collectives_s = self._backward_s = 0.0
        self._computed_s: float | None = None

    def add_collective(self, began_s: float) -> None:
        self._collectives_s += self.clock() - began_s

    def time_backward(self, loss: Tensor) -> None:
        """Measure the backward of this loss, whose gradients are reduced over the ranks."""
        loss.register_hook(lambda _: torch_private.at_end_of_backward(self._computed))

    def _computed(self) -> None:
        self._computed_s = self.clock()
        self._interval.first()

    def end_backward(self) -> None:
        self._interval.second()
        if self._computed_s is not None:
            self._backward_s = self.clock() - self._computed_s

    def take_wait_s(self) -> float:
        """The seconds waited in a step, which the device must have finished; reset."""
        if self._computed_s is not None and (on_device_s := self._interval.between_s()) is not None:
            self._backward_s = on_device_s
        waited_s = self._collectives_s + self._backward_s
        self.reset()
        return waited_s
