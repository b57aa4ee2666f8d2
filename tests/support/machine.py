"""Resources of the machine, which tests share with other users and with copies of these tests."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

AT_ONCE_S = 4.0
"""Shorter than 4.3 s, after which orphans are killed: shows that the exit was orderly."""
GONE_S = 20.0
"""Orphans are killed within 5 s; the rest is a margin for a busy machine."""


def free_port() -> int:
    """A free port below the ephemeral range, where no outgoing connection takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def left_in_shared_memory(before: set[str], pids: Iterable[int], limit_s: float = 30.0) -> set[str]:
    """The names not in `before` that `pids` have left: their numbers are ids of processes. A name
    without a number is somebody else's if it goes within `limit_s`."""
    deadline_s, own = time.monotonic() + limit_s, set(pids)

    def left() -> set[str]:
        new = shared_memory() - before
        numbers = {name: {int(n) for n in re.findall(r"_(\d+)(?=_)", name)} for name in new}
        return {name for name in new if not numbers[name] or numbers[name] & own}

    while (found := left()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return found


def default_signals() -> None:
    """Reset signals to their defaults, as in a terminal: under `nohup` or in a shell's background
    some are ignored, which child processes inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait for processes to exit; returns those still alive after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (left := {pid for pid in pids if alive(pid)}) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return left


def listening(pid: int) -> dict[str, str]:
    """Addresses, by inode, of the TCP sockets on which a process listens."""
    targets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
            targets.add(os.readlink(entry))
    return {inode: at for inode, at in listeners().items() if f"socket:[{inode}]" in targets}


def listeners() -> dict[str, str]:
    """Addresses, by inode, of all listening TCP sockets: another process may reuse a port."""
    sockets = [line.split() for table in ("tcp", "tcp6")
               for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return {fields[9]: fields[1].partition(":")[0] for fields in sockets if fields[3] == "0A"}
