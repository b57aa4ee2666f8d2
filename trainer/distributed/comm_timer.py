"""Measure how long a rank waits for the others in a step, without a collective or device sync."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

SAMPLED, LONG_S = 8, 0.02
"""Measuring a backward costs 15 µs. All steps of at least LONG_S seconds are measured. With
shorter steps, every SAMPLED-th one is measured and counts SAMPLED times."""


class DeviceInterval:
    """Two events on the CUDA stream, which measure an interval without a device sync.

    On other devices the methods do nothing.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        make = torch.cuda.Event
        self._events = (make(enable_timing=True), make(enable_timing=True)) if on_cuda else None

    def first(self) -> None:
        """Record the first event."""
        if self._events is not None:
            self._events[0].record()

    def second(self) -> None:
        """Record the second event."""
        if self._events is not None:
            self._events[1].record()

    def between_s(self) -> float | None:
        """Return the seconds between the events. The device must have passed both."""
        if self._events is None:
            return None
        return self._events[0].elapsed_time(self._events[1]) / 1000


class CommunicationTimer:
    """Measure the time of a step that this rank waits in collectives, not hidden by computation.

    In the backward it is the time from when the gradients of this rank are ready until all are
    reduced. The autograd engine runs a callback in between, before the callback of the reducer. On
    a GPU the interval is measured on the device. The gathers of synchronised batch norms on a CPU
    count as well.

    Args:
        ranks: size of the group. A single rank never waits.
        clock: returns seconds.
    """

    def __init__(
        self, *, ranks: int = 1, on_cuda: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._interval = DeviceInterval(on_cuda=on_cuda)
        self._enabled, self._clock = ranks > 1, clock
        self._gathered_s = 0.0
        self._computed_s: float | None = None
        self._weight, self._steps, self._last_s = 0, 0, 0.0
        self._waited_s = 0.0

    def begin_collective(self) -> float:
        """Begin a collective. Return the argument for `end_collective`."""
        return self._clock()

    def end_collective(self, began_s: float) -> None:
        """End the collective that began at this time."""
        self._gathered_s += self._clock() - began_s

    def time_backward(self, loss: Tensor) -> None:
        """Measure the backward of this loss, whose gradients are reduced over the ranks."""
        if not self._enabled:
            return
        self._steps += 1
        is_long = self._last_s >= LONG_S
        if is_long or self._steps % SAMPLED == 1:
            self._weight = 1 if is_long else SAMPLED
            loss.register_hook(self._queue_callback)

    def end_backward(self) -> None:
        """End the backward."""
        if not self._weight:
            return
        self._interval.second()
        if self._computed_s is not None:
            self._waited_s = self._weight * (self._clock() - self._computed_s)

    def take_wait_s(self, step_s: float) -> float:
        """Return the seconds waited in a step of `step_s` seconds, and reset.

        The device must have finished the step.
        """
        if not self._enabled:
            return 0.0
        if self._weight and self._computed_s is not None and (
                between_s := self._interval.between_s()) is not None:
            self._waited_s = self._weight * between_s
        waited_s = self._gathered_s + self._waited_s
        self.reset()
        self._last_s = step_s
        return waited_s

    def reset(self) -> None:
        """Reset after work that is not a step. The device need not have finished it."""
        self._gathered_s = self._waited_s = 0.0
        self._weight, self._computed_s, self._last_s = 0, None, 0.0

    def _queue_callback(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._computed_s = self._clock()
        self._interval.first()
