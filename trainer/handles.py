"""Open files after a fork: each process reads at a place of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat


def part() -> None:
    """In a fresh fork: open anew, at the same place, what was open for reading.

    A fork shares each open file with its parent and its siblings, the place in it too: a seek in
    one process moves the reading of all, so that two of them read wrong bytes without an error.
    What is open for writing is left as it is: there the shared place keeps one from writing over
    another. Linux only; elsewhere, and where a file can't be opened anew, nothing is done.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                _open_anew(int(name))


def _open_anew(fd: int) -> None:
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
