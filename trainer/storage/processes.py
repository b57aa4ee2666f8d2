"""Processes of this host, from /proc: their identity, and whether they are active."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import socket
import stat
import time


def die_with_parent(number: int) -> None:
    """Let the kernel send this signal to this process when its parent dies; 0 for none."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def separate_reads() -> None:
    """In a new fork: reopen files that are open for reading, at the same position. Forks share the
    position of open files: a seek in one process moves the others, which then read wrong bytes
    without an error. For files open for writing that keeps processes from overwriting each other.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(os.fstat(fd).st_mode):
                with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as reopened:
                    reopened.seek(os.lseek(fd, 0, os.SEEK_CUR))
                    os.dup2(reopened.fileno(), fd, inheritable=os.get_inheritable(fd))


BUSY, BUSY_BYTES = 0.1, 1 << 16  # an active process uses this share of a core, or moves so much
_TICKS = os.sysconf("SC_CLK_TCK")


def host() -> str:
    """Equal for processes that can signal each other by pid: same boot and pid namespace."""
    parts = [_read("/proc/sys/kernel/random/boot_id").decode().strip() or socket.gethostname()]
    with contextlib.suppress(OSError):  # a sandbox may not show it
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def start_time(pid: int) -> int | None:
    """Start time, which distinguishes it from a later process with its pid; None: it has ended."""
    fields = _stat(f"/proc/{pid}")
    return None if fields[0] in "ZX" else int(fields[19])


def state(pid: int) -> str:
    """R runs, S sleeps, D waits for a disk, T is stopped, …; X if there is no such process."""
    return _stat(f"/proc/{pid}")[0]


def is_alive(pid: int) -> bool:
    """Whether a process has not ended (also not as a zombie)."""
    return state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    return state(pid) in "Tt"


def name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def set_name(name: str) -> None:
    """Set the name of this process, which `ps` and `top` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def command_line(pid: int) -> list[str]:
    return os.fsdecode(_read(f"/proc/{pid}/cmdline")).split("\0")[:-1]


def program(pid: int) -> str:
    """The module (`python -m`) or the name of the script that a Python process runs, if any."""
    words = command_line(pid)[1:]
    while words and words[0].startswith("-"):
        option, *words = words
        if option.endswith("m"):
            break
        if option.endswith("c"):
            return ""
        if option in ("-W", "-X"):
            words = words[1:]
    return os.path.basename(words[0]) if words else ""


def parent(pid: int) -> int:
    """Pid of the parent; 0: there is none."""
    return int(_stat(f"/proc/{pid}")[1])


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def describe_process(pid: int) -> str:
    """State of a process that cannot report itself, as /proc shows it."""
    paths = [f"/proc/{pid}/{entry}" for entry in ("status", "wchan", "syscall", "stack")]
    return "\n".join(f"{path}:\n{_read(path).decode(errors='replace').strip()}\n" for path in paths)


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
            places, times = [f"/proc/{self._pid}/task/{self._thread}"], slice(11, 13)
        else:
            pids = [self._pid]
            for pid in pids:
                pids += children(pid)  # which the loop then visits too
            places, times = [f"/proc/{pid}" for pid in pids], slice(11, 15)
        ticks, count, blocked = 0, 0, False
        for place in places:
            fields = _stat(place)
            ticks += sum(map(int, fields[times]))  # utime, stime; of children that have ended, too
            blocked |= fields[0] == "D"
            for line in _read(f"{place}/io").splitlines():
                key, value = line.split(b": ")
                count += int(value) if key in (b"rchar", b"wchar", b"read_bytes") else 0
        return ticks / _TICKS, count, blocked


def _stat(place: str) -> list[str]:
    """Fields of a stat file, from the state on; ["X", "0"]: there is no such process."""
    fields = _read(f"{place}/stat").decode(errors="replace").rpartition(")")[2].split()
    return fields or ["X", "0"]


def _read(path: str) -> bytes:
    """Content of a file of /proc; empty if it cannot be read, or there is no such process."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
