"""Open files after a fork: give each process its own read position."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat


def separate_reads() -> None:
    """In a new fork: reopen files that are open for reading, at the same position.

    A fork shares each open file, with its position, with its parent and siblings: a seek in one
    process moves the others, which then read wrong bytes without an error. Files open for writing
    are left alone: there the shared position keeps processes from overwriting each other. Linux
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
    anew = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    try:
        os.lseek(anew, place, os.SEEK_SET)
        os.dup2(anew, fd, inheritable=os.get_inheritable(fd))
    finally:
        os.close(anew)
