"""Output into a pipe whose reader has seen enough (`| head`)."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

EXIT_PIPE = 141
"""What a shell says of a program that SIGPIPE has ended."""


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """What is printed inside may be cut off; then nothing is said of it.

    Raises:
        SystemExit: with EXIT_PIPE, where what is inside can't go on for it. What has come to its
            end keeps its own exit code.
    """
    try:
        yield
    except BrokenPipeError:
        if not any(map(_has_no_reader, (sys.stdout, sys.stderr))):
            raise  # of another pipe: a failure like any other
        raise SystemExit(EXIT_PIPE) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _flush(stream: TextIO) -> None:
    """Now, or never: not at the interpreter's end, which would speak of it."""
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
