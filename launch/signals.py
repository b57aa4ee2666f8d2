"""Stop requests by signals to the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from trainer.errors import EXIT_STOPPED
from trainer.resilience.stop_signals import handle_stop_signals, wakeup_pipe


class LauncherStop:
    """Stores the first stop signal. `wakeup_fd` becomes readable at each one."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._end: Callable[[], None] = lambda: os._exit(1)
        self._exits_immediately = False
        self.wakeup_fd = -1
        self._num_interrupts = 0

    def request(self, number: signal.Signals) -> None:
        """Request a stop, as if this signal had arrived."""
        self.signal = number

    def exit_immediately(self, on: bool) -> None:
        """Exit at the first signal, even during an import, because nothing needs to be saved."""
        self._exits_immediately = on

    def on_second_interrupt(self, end: Callable[[], None]) -> None:
        """Call `end` at a second SIGINT, in the handler."""
        self._end = end

    def install(self) -> None:
        """Handle the stop signals for the rest of the process's life."""
        self.wakeup_fd, write_fd = wakeup_pipe()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        handle_stop_signals(self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._exits_immediately:
            os._exit(EXIT_STOPPED)
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self._end()
