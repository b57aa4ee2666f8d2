"""Requests to stop: signals and the launcher's death set a flag; the step takes it to all ranks."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ORPHAN_LIMIT_S = 4.0
"""Seconds that a rank lives on without its launcher, to save."""


class StopRequest:
    """A flag that signals set. Any number of signals is one request; a second SIGINT leaves at
    once.

    A thread attends to it, so that the request counts from the signal on, also while the main
    thread is in C for long: it leaves where nothing has to be saved, or when the time is up.

    Args:
        clock: seconds, monotonic.

    Attributes:
        senders: after `shield`, how many signals came from which process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.requested = False
        self.reason = ""
        self.since_s = 0.0
        self.senders: Counter[int] = Counter()
        self._clock = clock
        self._numbers: set[signal.Signals] = set()
        self._shielded = False
        self._told, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._grace_s = math.inf
        self._late: Callable[[], int] = lambda: 1
        self._idle: Callable[[], bool] = lambda: False
        self._leave: Callable[[], int] = lambda: 1
        self._leaving = threading.Lock()

    def install(self) -> None:
        """Handle the signals from now on. As early as possible: before torch is imported."""
        for number in SIGNALS:
            # `nohup` ignores SIGHUP so that the run outlives its terminal: leave it so.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
                self._numbers.add(number)
        # Python's handlers wait for the main thread; this is written by the signal itself.
        signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # for the thread, which inherits it
        threading.Thread(target=self._attend, name="stop", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def shield(self) -> None:
        """Let a thread of its own take the signals, which sees who sends them.

        Main thread only. What it starts from now on (compilers, loader processes) has the signals
        blocked: it outlives one that is sent to the whole process group.
        """
        if not self._shielded:
            self._shielded = True
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            threading.Thread(target=self._take, name="stop-signals", daemon=True).start()

    def request(self, reason: str) -> None:
        """Ask for a stop at the next step boundary."""
        if not self.requested:
            self.reason, self.since_s = reason, self._clock()
            self.requested = True
            self._wake()

    def only_from(self, process: int) -> bool:
        """Whether it is known that nobody but this process has sent signals."""
        return self.requested and set(self.senders) == {process}

    def limit(self, grace_s: float, late: Callable[[], int]) -> None:
        """Leave for good when a stop takes longer than `grace_s` seconds from the signal on.

        Args:
            late: called then, in a thread; returns the exit code.
        """
        self._grace_s, self._late = grace_s, late
        self._wake()

    def leave_when(self, idle: Callable[[], bool], leave: Callable[[], int]) -> None:
        """Leave for good, at once, when a stop is asked for and there is nothing to save.

        Args:
            idle: whether that is so now.
            leave: called then, in a thread; returns the exit code.
        """
        self._idle, self._leave = idle, leave
        self._wake()

    def leave_if_idle(self) -> None:
        """Don't return if a stop is asked for and there is nothing to save."""
        if self.requested and self._idle():
            self._end(self._leave)

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
        self.request(signal.Signals(number).name)

    def _take(self) -> None:
        while True:
            info = signal.sigwaitinfo(self._numbers)
            self.senders[info.si_pid] += 1
            self._wake(info.si_signo)

    def _attend(self) -> None:
        interrupts = 0
        while True:
            left_s = self.since_s + self._grace_s - self._clock() if self.requested else math.inf
            timeout_s = None if left_s == math.inf else max(0.0, left_s)
            if select.select([self._told], [], [], timeout_s)[0]:
                for number in os.read(self._told, 512):
                    if number not in self._numbers:  # 0, or one that is none of ours (SIGCHLD)
                        continue
                    interrupts += number == signal.SIGINT
                    if interrupts > 1:
                        os._exit(128 + signal.SIGINT)
                    self.request(signal.Signals(number).name)
            elif self.requested and self._clock() - self.since_s >= self._grace_s:
                self._end(self._late)
            self.leave_if_idle()

    def _wake(self, number: int = 0) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full: the thread is awake
            os.write(self._tell, bytes([number]))

    def _end(self, last: Callable[[], int]) -> NoReturn:
        with self._leaving:  # for good: a second thread that comes here waits for the end
            os._exit(last())


def process_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when a process ends."""
    return os.pidfd_open(pid)
