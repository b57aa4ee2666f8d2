"""The last step boundary, as another thread may save it while the next step computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.buffers import Buffers
from trainer.telemetry.status import Status


class StepBoundary:
    """Copies of the buffers at the last step boundary, and the lock of its state.

    The lock is free from the beginning of a step to its update: so long, parameters, optimizer,
    progress and the copies are those of the boundary. Another thread that takes the lock may save
    them, and the main thread can't update any more.
    """

    def __init__(self, model: nn.Module, status: Status,
                 warn: Callable[[str], None] = lambda text: None) -> None:
        self.buffers = Buffers(model, warn=warn)
        self.only_buffers_change = False
        """Whether a forward changes nothing else of the state, as the warm-up has found."""
        self._status, self._lock = status, threading.Lock()
        self._holds_lock = self._lock.acquire()  # of the main thread
        self._device = next(model.parameters()).device
        self._event = torch.cuda.Event() if self._device.type == "cuda" else None

    def note_constant_parameters(self) -> None:
        self.only_buffers_change = True

    def begin_step(self) -> None:
        """Copy the buffers, and let other threads save the boundary."""
        self.buffers.keep()
        self._status.begin_step()  # not before `keep`: an error would restore older buffers
        if self._event is not None:
            self._event.record()
        if self._holds_lock:
            self._holds_lock = False
            self._lock.release()

    def close(self, timeout_s: float = -1) -> bool:
        """Take the lock in the main thread, for the update or for a save. Returns False if the time
        has passed: another thread saves, and ends the process."""
        self._holds_lock = self._holds_lock or self._lock.acquire(timeout=timeout_s)
        return self._holds_lock

    def take(self) -> bool:
        """Take the lock in another thread, which may save the boundary then. Returns False if it
        isn't free, or if this step has changed more than the buffers in their storage."""
        return (self.only_buffers_change and not self.buffers.was_reassigned
                and self._lock.acquire(blocking=False))

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which another thread reads the state: on a GPU, a side stream that waits only
        for the work before the boundary."""
        if self._event is None:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._event)
        return torch.cuda.stream(stream)
