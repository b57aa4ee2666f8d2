"""Processes of this host, from /proc: their identity, and whether they are active."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import time
from collections.abc import Callable


def separate_reads() -> None:
    """In a new fork: reopen files that are open for reading, at the same position.

    A fork shares each open file, with its position, with its parent and siblings: a seek in one
    process moves the others, which then read wrong bytes without an error. Files open for writing
    are not changed: there the shared position keeps processes from overwriting each other. Linux
    only; elsewhere, and for a file that cannot be reopened, nothing changes.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                _reopen(int(name))


def _reopen(fd: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(os.fstat(fd).st_mode):
        return
    place = os.lseek(fd, 0, os.SEEK_CUR)
    reopened = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        os.lseek(reopened, place, os.SEEK_SET)
        os.dup2(reopened, fd, inheritable=os.get_inheritable(fd))
    finally:
        os.close(reopened)


BUSY = 0.1
"""Share of a core above which a process counts as active."""

BUSY_BYTES = 1 << 16
"""Bytes read and written between two looks above which it counts as active."""

_TICKS = os.sysconf("SC_CLK_TCK")


def host() -> str:
    """Equal for processes that can signal each other by pid: same boot and pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def start_time(pid: int) -> int | None:
    """Start time, to distinguish a process from a later one with its pid; None if it has ended."""
    fields = _stat(f"/proc/{pid}")
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def state(pid: int, thread: int | None = None) -> str:
    """R runs, S sleeps, D waits for a disk, T is stopped, …; X if there is no such process."""
    fields = _stat(f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}")
    return "X" if fields is None else fields[0]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    return state(pid) in "Tt"


def name(pid: int) -> str:
    """Name of a process, as `ps` shows it."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """Pid of the parent; 0 without a parent or without such a process."""
    fields = _stat(f"/proc/{pid}")
    return 0 if fields is None else int(fields[1])


def children(pid: int) -> list[int]:
    """Pids of the living children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def describe_process(pid: int) -> str:
    """State of a process as /proc shows it, for one that cannot report itself."""
    parts = []
    for entry in ("status", "wchan", "syscall", "stack"):
        try:
            with open(f"/proc/{pid}/{entry}") as file:
                parts.append(f"/proc/{pid}/{entry}:\n{file.read().strip()}\n")
        except OSError as error:
            parts.append(f"/proc/{pid}/{entry}: {error.strerror}\n")
    return "\n".join(parts)


def read_memory(pid: int, name: str) -> bytes | None:
    """Content of a process's memory file of this name, also while it is stopped; None: no file."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):  # it is gone, or another user's
        for entry in os.listdir(folder):
            if os.readlink(f"{folder}/{entry}").startswith(f"/memfd:{name} "):
                with open(f"{folder}/{entry}", "rb") as file:
                    return file.read()
    return None


def kill(pid: int, started: int) -> bool:
    """SIGKILL a process if its start time is `started`; returns whether it was."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_time(pid) != started:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


class Activity:
    """Activity of a process and its children, or of one thread: processor time, reads and writes.

    Args:
        thread: look only at this thread of the process.
        clock: seconds, monotonic.
    """

    def __init__(
        self, pid: int, *, thread: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pid, self._thread, self._clock = pid, thread, clock
        self._at_s = clock()
        self._cpu_s, self._bytes, _ = self._used()

    def seen(self) -> bool:
        """Whether there was activity since the last look; looks within 0.5 s count as one.
        Always true on systems without /proc."""
        if not os.path.exists("/proc/self/stat"):
            return True
        now = self._clock()
        if now - self._at_s < 0.5:
            return False
        cpu_s, count, blocked = self._used()
        busy = cpu_s - self._cpu_s >= BUSY * (now - self._at_s)
        moved = count - self._bytes >= BUSY_BYTES
        self._at_s, self._cpu_s, self._bytes = now, cpu_s, count
        return busy or moved or blocked

    def _used(self) -> tuple[float, int, bool]:
        """(processor time in seconds, bytes read and written, whether it waits for a disk)."""
        if self._thread is not None:
            return _used(f"/proc/{self._pid}/task/{self._thread}", with_dead=False)
        total, count, blocked = 0.0, 0, False
        waiting = [self._pid]
        while waiting:
            pid = waiting.pop()
            one = _used(f"/proc/{pid}", with_dead=True)
            total, count, blocked = total + one[0], count + one[1], blocked or one[2]
            waiting += children(pid)
        return total, count, blocked


def _used(place: str, *, with_dead: bool) -> tuple[float, int, bool]:
    fields = _stat(place)
    if fields is None:
        return 0.0, 0, False
    # utime and stime, plus those of children that have ended.
    ticks = sum(map(int, fields[11:15] if with_dead else fields[11:13]))
    count = 0
    with contextlib.suppress(OSError), open(f"{place}/io") as file:
        lines = dict(line.split(": ") for line in file.read().splitlines())
        count = sum(int(lines[key]) for key in ("rchar", "wchar", "read_bytes"))
    return ticks / _TICKS, count, fields[0] == "D"


def _stat(place: str) -> list[str] | None:
    """Fields of a stat file from the state on; None: no such process."""
    try:
        with open(f"{place}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
