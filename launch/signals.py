"""Stop requests: what the launcher's own signals ask for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType

from trainer.errors import EXIT_STOPPED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""One of these, to the launcher or to a rank, asks the run to save and stop."""


class StopRequest:
    """Remembers the first stop signal; a second SIGINT calls `on_insist`, from inside the handler.

    `wakeup_fd` becomes readable at each signal, so that whoever waits for other things as well
    can wait for it too.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.on_insist: Callable[[], None] = lambda: os._exit(1)
        self.at_once = False
        """Whether nothing is under way that would have to be stopped: the first signal ends the
        process, also amid an import."""
        self.wakeup_fd = -1
        self._num_interrupts = 0

    def install(self) -> None:
        """Take the stop signals over, for the rest of the process's life."""
        self.wakeup_fd, write_fd = os.pipe()
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # `nohup` ignores SIGHUP so that the run outlives its terminal: leave it so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def drain(self) -> None:
        """Make `wakeup_fd` unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup_fd, 4096)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.at_once:
            os._exit(EXIT_STOPPED)
        if self.signal is None:
            self.signal = signal.Signals(number)
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            self.on_insist()
