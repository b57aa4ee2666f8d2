"""The last step boundary, as another thread may save it while the next step computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.buffers import Buffers
from trainer.checkpoint.snapshot import Live, Snapshot
from trainer.distributed.torch_private import version
from trainer.storage.layout import MODEL
from trainer.telemetry.status import Phase, Status


class StepBoundary:
    """Copies of the buffers at the last step boundary, and the lock of its state.

    The lock is free from the beginning of a step to its update: so long, parameters, optimizer,
    progress and the copies are those of the boundary. Another thread that takes the lock may save
    them, and the main thread can't update any more.
    """

    def __init__(self, model: nn.Module, status: Status,
                 warn: Callable[[str], None] = lambda text: None,
                 device: torch.device | None = None) -> None:
        """`device`: by default that of the model."""
        self.buffers = Buffers(model, warn=warn)
        self._constant = False
        self._versions: list[int] = []
        self._status, self._lock = status, threading.Lock()
        self._holds_lock = self._lock.acquire()  # of the main thread
        self._device = device or next(model.parameters()).device
        self.on_cuda = self._device.type == "cuda"
        self._event = torch.cuda.Event() if self.on_cuda else None
        self._arrival = torch.cuda.Event(blocking=True) if self.on_cuda else None
        # Made now: torch gives out its streams in turn, later one may be that of a stuck kernel.
        self._side_stream = torch.cuda.Stream(self._device) if self.on_cuda else None
        self._parameters = list(model.parameters())
        self.snapshot = Snapshot(self._device)
        """Copies of the state for saves, which a GPU may make until the update of the next step."""
        if self.on_cuda:
            status.on_phase(self._protect_outside_steps)

    def note_constant_parameters(self) -> None:
        """Note that the warm-up has found no parameters that the forward changes."""
        self._constant = True

    @property
    def only_buffers_change(self) -> bool:
        """Whether forwards have changed nothing else of the state, in the warm-up and since the
        step began."""
        return self._constant and self._versions == [*map(version, self._parameters)]

    def note_versions(self) -> None:
        """Note how often the parameters have been changed in place, when a step begins."""
        self._versions = [*map(version, self._parameters)]

    def copy(self, state: Live) -> dict[str, dict[str, Tensor]]:
        """Copy the state for a save: see `Snapshot.take`."""
        if not self.on_cuda:
            return self.snapshot.take(state)
        moving = {tensor.data_ptr() for tensor in state[MODEL].values()} - {
            parameter.data_ptr() for parameter in self._parameters}
        copies = self.snapshot.take(state, moving=moving)
        self._protect_outside_steps(self._status.phase)
        return copies

    def _protect_outside_steps(self, phase: Phase) -> None:
        """From a save to the next update only the forward changes the state, and no parameters;
        elsewhere anything may change it, such as the exchange of weights and their average."""
        if phase is not Phase.TRAIN or not self._constant:
            self.snapshot.protect()

    def begin_step(self) -> None:
        """Copy the buffers, and let other threads save the boundary."""
        self.buffers.keep()
        self.note_versions()
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
        if self._holds_lock:
            self.snapshot.protect()
        return self._holds_lock

    def wait_for_device(self) -> None:
        """Wait for what is queued on a GPU. A broadcast is only queued: if its source dies, this
        rank must not have begun the update, which would wait for it for ever."""
        if self._arrival is not None:
            self._arrival.record()
            self._arrival.synchronize()

    def take(self) -> bool:
        """Take the lock in another thread, which may save the boundary then. Returns False if it
        isn't free, or if this step has changed more than the buffers in their storage."""
        return (self.only_buffers_change and not self.buffers.was_reassigned
                and self._lock.acquire(blocking=False))

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which another thread reads the state: on a GPU, a side stream that waits only
        for the work before the boundary."""
        if self._event is None or self._side_stream is None:
            return contextlib.nullcontext()
        self._side_stream.wait_event(self._event)
        return torch.cuda.stream(self._side_stream)
