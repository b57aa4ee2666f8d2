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
        self.wakeup_fd = -1
        self._kill: Callable[[], None] | None = None  # None: there are no ranks yet
        self._num_interrupts = 0

    def install(self) -> None:
        """Handle the stop signals from now on. Until `defer` is called, the first one exits at
        once, even during an import, because nothing needs to be saved."""
        self.wakeup_fd, write_fd = wakeup_pipe()
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        handle_stop_signals(self._handle)

    def defer(self, kill: Callable[[], None]) -> None:
        """Only store signals from now on, but call `kill`, in the handler, at a second SIGINT."""
        self._kill = kill

    def request(self, number: signal.Signals) -> None:
        """Request a stop, as if this signal had arrived."""
        self.signal = number

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._kill is None:
            os._exit(EXIT_STOPPED)
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self._kill()
