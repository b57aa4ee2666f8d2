"""Requests to stop: signals and the launcher's death set a flag; the step takes it to all ranks."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ORPHAN_LIMIT_S = 4.0
"""Seconds that a rank lives on without its launcher, to save."""


class StopRequest:
    """A flag that signal handlers set. Any number of signals is one request; a second SIGINT
    leaves at once.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self.reason = ""
        self.since_s = 0.0
        self._clock = clock
        self._interrupts = 0
        self._told, self._tell = os.pipe()

    def install(self) -> None:
        """Handle the signals from now on. As early as possible: before torch is imported."""
        for number in SIGNALS:
            # `nohup` ignores SIGHUP so that the run outlives its terminal: leave it so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def request(self, reason: str) -> None:
        """Ask for a stop at the next step boundary."""
        if not self.requested:
            self.reason, self.since_s = reason, self._clock()
            self.requested = True
            os.write(self._tell, b"!")  # wakes who waits for it, and is safe in a handler

    def waited_s(self) -> float:
        """Seconds since the stop was first asked for."""
        return self._clock() - self.since_s if self.requested else 0.0

    def limit(self, grace_s: float, late: Callable[[], None]) -> None:
        """Leave for good, with 1, when a stop has taken longer than `grace_s` seconds.

        Args:
            late: called just before, to say so.
        """
        def wait() -> None:
            select.select([self._told], [], [])
            time.sleep(grace_s)
            late()
            os._exit(1)

        threading.Thread(target=wait, name="stop-limit", daemon=True).start()

    def watch(self, descriptor: int, who: str) -> None:
        """Take it as a request when `descriptor` (a pidfd, a pipe) tells that `who` is gone, and
        leave for good `ORPHAN_LIMIT_S` later, so that an orphan never lives on."""
        thread = threading.Thread(
            target=self._watch, args=(descriptor, who), name="launcher-watch", daemon=True
        )
        thread.start()

    def _watch(self, descriptor: int, who: str) -> None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
        poll.poll()
        self.request(f"{who} is gone")
        time.sleep(ORPHAN_LIMIT_S)
        os._exit(1)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(128 + number)
        self.request(signal.Signals(number).name)


def process_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when a process ends."""
    return os.pidfd_open(pid)
