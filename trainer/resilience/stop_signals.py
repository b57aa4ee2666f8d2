"""Stop requests: signals and the launcher's death set a flag, which the step sends to all ranks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

from trainer.storage import processes

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each of these, sent to the launcher or to a rank, requests that the run saves and stops."""
LAST_S = 60.0  # time limit of the last part of a stop, in seconds: it may include a save
ORPHAN_LIMIT_S = 4.0  # seconds that a rank has to save after its launcher is gone


class StopSignals:
    """A flag that signals set: any number is one request, but a second SIGINT exits at once. A
    thread acts on it, also while the main thread runs C code: it ends the process if nothing has to
    be saved, or when the time is up."""

    def __init__(self) -> None:
        self.reason = ""
        self.since_s = 0.0
        self.launcher = os.getppid()
        self.senders: Counter[int] = Counter()  # after `shield`: signals by sending process
        self._requested = False
        self._interrupts = 0
        self._wake_reader = self._wake_writer = -1  # of a pipe, from `install` on
        self._grace_s = math.inf
        self._late: Callable[[], int] = lambda: 1
        self._idle: Callable[[], bool] = lambda: False
        self._leave: Callable[[], int] = lambda: 1
        self._leaving = threading.Lock()
        self._before: dict[signal.Signals, Any] = {}  # handled signal → its handler before
        self._wakeup_before = -1
        self._blocked = -1  # after `shield`: a descriptor, readable while a signal is pending
        self._taking = threading.RLock()  # a handler may run in the thread that holds it
        self._over = False

    @property
    def requested(self) -> bool:
        """Whether a stop is requested, also by a signal that no thread has handled yet."""
        if not self._requested:
            self._take_pending()
        return self._requested

    def install(self) -> None:
        self._wake_reader, self._wake_writer = wakeup_pipe()
        self._before = handle_stop_signals(self._handle)
        # Python's handlers wait for the main thread; the signal itself writes to this.
        self._wakeup_before = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: self._over or signal.set_wakeup_fd(-1))
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the thread inherits the mask
        threading.Thread(target=self._attend, name="stop", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def uninstall(self) -> None:
        """Restore the handlers from before `install`. Main thread only."""
        self._over = True
        self._wake()
        if self._blocked >= 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def shield(self) -> None:
        """Block the signals and take them when they are pending, which tells who has sent them.
        Main thread only. Processes started from now on survive a signal to the whole group."""
        if self._blocked < 0 and self._before:  # signals with another handler are not shielded
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            self._blocked = _signal_fd(self._before)
            self._wake()

    def request(self, reason: str) -> None:
        if not self._requested:
            self.reason, self.since_s = reason, time.monotonic()
            self._requested = True
            self._wake()

    def only_from(self, process: int) -> bool:
        return self.requested and set(self.senders) == {process}

    def limit(self, grace_s: float, late: Callable[[], int]) -> None:
        """If a stop takes longer than `grace_s` seconds from the signal on, call `late` in a thread
        and end the process with the exit code that it returns."""
        self._grace_s, self._late = grace_s, late
        self._wake()

    def leave_when(self, idle: Callable[[], bool], leave: Callable[[], int]) -> None:
        """The same with `leave` as soon as a stop is requested while nothing is to be saved."""
        self._idle, self._leave = idle, leave
        self._wake()

    def disarm(self) -> None:
        self._grace_s = math.inf
        self._wake()

    def leave_if_idle(self) -> None:
        if self.requested and self._idle():
            self._end(self._leave)

    def watch(self, descriptor: int, who: str, *, gone: bool = False) -> None:
        """Request a stop when `descriptor` (a pidfd or a pipe) shows that `who` is gone, or at once
        if `gone`; end the process `ORPHAN_LIMIT_S` later, so that no orphan stays."""

        def wait() -> None:
            while not gone and not is_readable(descriptor, math.inf):
                pass
            self.request(f"{who} is gone")
            time.sleep(ORPHAN_LIMIT_S)
            os._exit(1)

        threading.Thread(target=wait, name="launcher-watch", daemon=True).start()

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def _take_pending(self) -> None:
        """Take the blocked signals. The lock is held from the removal of a signal to its record:
        another thread finds one of them."""
        if self._blocked < 0:
            return
        with self._taking:
            while (info := signal.sigtimedwait(self._before, 0)) is not None:
                self.senders[info.si_pid] += 1
                self.request(signal.Signals(info.si_signo).name)
                self._wake(info.si_signo)

    def _attend(self) -> None:
        while not self._over:
            left_s = self.since_s + self._grace_s - time.monotonic() if self.requested else math.inf
            if is_readable(self._wake_reader, left_s, self._blocked):
                self._take_pending()
                for number in self._read_signals():
                    if number in self._before:  # not 0, or a signal of others (SIGCHLD)
                        self.request(signal.Signals(number).name)
            elif self.requested and time.monotonic() - self.since_s >= self._grace_s:
                self._end(self._late)
            self.leave_if_idle()

    def _read_signals(self) -> bytes:
        """The signals since the last call. Exits at the second SIGINT."""
        numbers = drain(self._wake_reader)
        self._interrupts += numbers.count(signal.SIGINT)
        if self._interrupts > 1:
            os._exit(128 + signal.SIGINT)
        return numbers

    def _wake(self, number: int = 0) -> None:
        if self._wake_writer >= 0:
            with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is awake
                os.write(self._wake_writer, bytes([number]))

    def _end(self, last: Callable[[], int]) -> NoReturn:
        with self._leaving:  # a second thread waits here for the end
            codes: list[int] = []

            def run() -> None:
                try:
                    codes.append(last())
                except BaseException:
                    traceback.print_exc()

            thread = threading.Thread(target=run, name="stop-last", daemon=True)
            thread.start()
            deadline_s = time.monotonic() + LAST_S
            while thread.is_alive() and time.monotonic() < deadline_s:
                if is_readable(self._wake_reader, 0.05, self._blocked):
                    self._take_pending()
                    self._read_signals()
            os._exit(codes[0] if codes else 1)


def attend() -> StopSignals:
    """Let signals, and under torchrun its end, request a stop of this rank. Call it before heavy
    imports: an orphan that notices nothing would join the store of the next start."""
    stop = StopSignals()
    stop.install()
    if "TORCHELASTIC_RUN_ID" in os.environ and "TRAINER_LAUNCH" not in os.environ:
        stop.shield()  # torchrun signals whole process groups, not only to stop
        parent = os.getppid()
        stop.watch(os.pidfd_open(parent), "the launcher", gone=parent == 1 and _is_init())
    return stop


def _is_init() -> bool:
    """Whether process 1, the parent of orphans, is certainly not torchrun."""
    words = " ".join(processes.command_line(1))
    return bool(words) and "python" not in words and "torch" not in words


def handle_stop_signals(
    handler: Callable[[int, FrameType | None], None],
) -> dict[signal.Signals, Any]:
    """Handle the stop signals; returns the handlers before. SIGHUP stays ignored under `nohup`, so
    that a run outlives its terminal."""
    return {number: signal.signal(number, handler) for number in STOP_SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}


def wakeup_pipe() -> tuple[int, int]:
    """A pipe for `signal.set_wakeup_fd`: neither end blocks."""
    return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)


def drain(descriptor: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 4096)
    return b""


def _signal_fd(numbers: Iterable[int]) -> int:
    """A descriptor that is readable while one of these signals, which are blocked, is pending."""
    libc, signals = ctypes.CDLL(None, use_errno=True), (ctypes.c_ulong * 16)()  # a sigset_t
    for number in numbers:
        libc.sigaddset(signals, number)
    if (descriptor := libc.signalfd(-1, signals, os.O_NONBLOCK | os.O_CLOEXEC)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "signalfd")
    return descriptor


def is_readable(descriptor: int, timeout_s: float, other: int = -1) -> bool:
    """Wait until there is something to read (in one of both) or the other end is closed, for at
    most `timeout_s` seconds or 24 days. (`select` does not take descriptors from 1,024 on.)"""
    poll = select.poll()
    for each in {descriptor, other} - {-1}:
        poll.register(each, select.POLLIN)
    return bool(poll.poll(min(1000 * max(0.0, timeout_s), 2.0**31 - 1)))
