"""Processes of this host, from /proc: their identity, and whether they are active."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import signal
import socket
import stat
import time


def die_with_parent(number: int) -> None:
    """Let the kernel send this signal to this process when its parent dies; 0 for none."""
    import ctypes

    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def separate_reads() -> None:
    """In a new fork: reopen files that are open for reading, at the same position.

    A fork shares the position of open files with its parent and siblings: a seek in one process
    moves the others, which then read wrong bytes without an error. Files open for writing are not
    changed: there the shared position keeps processes from overwriting each other.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            _reopen(int(entry))


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


BUSY = 0.1  # share of a core above which a process counts as active
BUSY_BYTES = 1 << 16  # bytes read and written between two looks above which it counts as active
_TICKS = os.sysconf("SC_CLK_TCK")


def host() -> str:
    """Equal for processes that can signal each other by pid: same boot and pid namespace."""
    boot_id = _read("/proc/sys/kernel/random/boot_id").decode().strip()
    return f"{boot_id or socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"


def start_time(pid: int) -> int | None:
    """Start time, to distinguish a process from a later one with its pid; None if it has ended."""
    fields = _stat(f"/proc/{pid}")
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def state(pid: int) -> str:
    """R runs, S sleeps, D waits for a disk, T is stopped, …; X if there is no such process."""
    fields = _stat(f"/proc/{pid}")
    return "X" if fields is None else fields[0]


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; false also for one whose parent has not reaped it."""
    return state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    return state(pid) in "Tt"


def name(pid: int) -> str:
    """Name of a process, as `ps` shows it."""
    return _read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def set_name(name: str) -> None:
    """Set the name of this process, which `ps` and `top` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def command_line(pid: int) -> list[str]:
    """Command line of a process; [] if there is no such process."""
    return os.fsdecode(_read(f"/proc/{pid}/cmdline")).split("\0")[:-1]


def program(pid: int) -> str:
    """The module (`python -m`) or the name of the script that a Python process runs, if any."""
    words = iter(command_line(pid)[1:])
    for word in words:
        if re.fullmatch("-[a-zA-Z]*m", word):
            return next(words, "")
        if re.fullmatch("-[a-zA-Z]*c", word):
            return ""
        if word in ("-W", "-X"):
            next(words, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
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
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def describe_process(pid: int) -> str:
    """State of a process as /proc shows it, for one that cannot report itself."""
    paths = [f"/proc/{pid}/{entry}" for entry in ("status", "wchan", "syscall", "stack")]
    return "\n".join(f"{path}:\n{_read(path).decode(errors='replace').strip()}\n"
                     for path in paths)


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
    with contextlib.suppress(OSError):  # it has ended
        descriptor = os.pidfd_open(pid)
        try:
            if start_time(pid) == started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


class Activity:
    """Processor time, reads and writes of a process and its children, or of one thread."""

    def __init__(self, pid: int, *, thread: int | None = None) -> None:
        self._pid, self._thread = pid, thread
        self._at_s, self._active_s = time.monotonic(), -math.inf
        self._cpu_s, self._bytes, _ = self._used()

    def quiet_s(self) -> float:
        """Look, and return for how long no activity was seen; inf: in no look so far."""
        if self.seen():
            self._active_s = self._at_s
        return time.monotonic() - self._active_s

    def seen(self) -> bool:
        """Whether there was activity since the last look; looks within 0.5 s count as one."""
        now = time.monotonic()
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
        pids = [self._pid]
        for pid in pids:
            pids += children(pid)  # which the loop then visits too
        found = [_used(f"/proc/{pid}", with_dead=True) for pid in pids]
        return (sum(cpu_s for cpu_s, _, _ in found), sum(count for _, count, _ in found),
                any(blocked for _, _, blocked in found))


def _used(place: str, *, with_dead: bool) -> tuple[float, int, bool]:
    fields = _stat(place)
    if fields is None:
        return 0.0, 0, False
    # utime and stime, plus those of children that have ended.
    ticks = sum(map(int, fields[11:15] if with_dead else fields[11:13]))
    lines = [line.split(b": ") for line in _read(f"{place}/io").splitlines()]
    count = sum(int(value) for key, value in lines if key in (b"rchar", b"wchar", b"read_bytes"))
    return ticks / _TICKS, count, fields[0] == "D"


def _stat(place: str) -> list[str] | None:
    """Fields of a stat file from the state on; None: no such process."""
    return _read(f"{place}/stat").decode(errors="replace").rpartition(")")[2].split() or None


def _read(path: str) -> bytes:
    """Content of a file of /proc; empty if it cannot be read, or there is no such process."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
