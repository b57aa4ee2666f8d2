"""Stop requests by signals to the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from trainer.errors import EXIT_STOPPED
from trainer.resilience.stop_signals import handle_stop_signals, wakeup_pipe


class LauncherStop:
    """Stores the first stop signal; a second SIGINT calls `on_second_interrupt` in the handler.
    `wakeup_fd` becomes readable at each signal, so that an event loop can wait for it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.on_second_interrupt: Callable[[], None] = lambda: os._exit(1)
        self.exit_at_first_signal = False  # even during an import: there is nothing to save
        self.wakeup_fd = -1
        self._num_interrupts = 0

    def install(self) -> None:
        """Handle the stop signals for the rest of the process's life."""
        self.wakeup_fd, write_fd = wakeup_pipe()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        handle_stop_signals(self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.exit_at_first_signal:
            os._exit(EXIT_STOPPED)
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self.on_second_interrupt()
