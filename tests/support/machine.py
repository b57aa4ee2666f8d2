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


def free_port() -> int:
    """A free port.

    Below the ephemeral range, where no outgoing connection takes it before the test does.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def shared_memory() -> set[str]:
    """The names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def left_in_shared_memory(before: set[str], pids: Iterable[int], limit_s: float = 30.0) -> set[str]:
    """The names not in `before` that remain, except those with the id of another process.

    Args:
        pids: the processes that may have left them. A name without a number is not theirs if it
            goes within `limit_s`: somebody else's is on its way.
    """
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
