"""How long a rank waits for the others in a step, without another collective or device sync."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

SAMPLED, LONG_S = 8, 0.02
"""To look into a backward takes 15 µs: it is done in each step that takes this long, else in every
eighth, which then stands for eight."""


class Marks:
    """Two points of the device's time line, so that timing waits for nothing. Nothing off CUDA."""

    def __init__(self, *, on_cuda: bool) -> None:
        make = torch.cuda.Event
        self._events = (make(enable_timing=True), make(enable_timing=True)) if on_cuda else None

    def first(self) -> None:
        """Mark the first point."""
        if self._events is not None:
            self._events[0].record()

    def second(self) -> None:
        """Mark the second point."""
        if self._events is not None:
            self._events[1].record()

    def between_s(self) -> float | None:
        """Seconds between the points, which the device has passed."""
        if self._events is None:
            return None
        return self._events[0].elapsed_time(self._events[1]) / 1000


class Communication:
    """What this rank waits in collectives that its own computation doesn't hide.

    In the backward that is the time from when its own gradients are there until all are reduced:
    autograd's engine calls back in between, on the way to the reducer's own callback. On a GPU it
    is that on the device's time line. The gathers of synchronised batch norms on a CPU count too.

    Args:
        ranks: of the group; one never waits.
        clock: seconds.
    """

    def __init__(
        self, *, ranks: int = 1, on_cuda: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._marks = Marks(on_cuda=on_cuda)
        self._on, self._clock = ranks > 1, clock
        self._gathered_s = 0.0
        self._computed_s: float | None = None
        self._weight, self._steps, self._last_s = 0, 0, 0.0
        self._waited_s = 0.0

    def began(self) -> float:
        """A collective begins: what to give to `ended`."""
        return self._clock()

    def ended(self, began_s: float) -> None:
        """A collective that began then is over."""
        self._gathered_s += self._clock() - began_s

    def watch(self, loss: Tensor) -> None:
        """The backward of this loss is going to be reduced over the ranks: look into it."""
        if not self._on:
            return
        self._steps += 1
        long = self._last_s >= LONG_S
        if long or self._steps % SAMPLED == 1:
            self._weight = 1 if long else SAMPLED
            loss.register_hook(self._call_back)

    def reduced(self) -> None:
        """The backward is over."""
        if not self._weight:
            return
        self._marks.second()
        if self._computed_s is not None:
            self._waited_s = self._weight * (self._clock() - self._computed_s)

    def take(self, step_s: float) -> float:
        """Seconds waited in the step that took `step_s`; starts anew. The device is through it."""
        if not self._on:
            return 0.0
        if self._weight and self._computed_s is not None and (
                between_s := self._marks.between_s()) is not None:
            self._waited_s = self._weight * between_s
        found = self._gathered_s + self._waited_s
        self.forget()
        self._last_s = step_s
        return found

    def forget(self) -> None:
        """Start anew, after what is no step. The device may still be at it."""
        self._gathered_s = self._waited_s = 0.0
        self._weight, self._computed_s, self._last_s = 0, None, 0.0

    def _call_back(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._computed_s = self._clock()
        self._marks.first()
