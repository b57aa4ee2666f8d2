"""Output whose reader has gone (`| head`, a terminal), or that a full disk doesn't take."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

EXIT_PIPE = 141
"""What a shell says of a program that SIGPIPE has ended."""

OUTPUTS = (("stdout", 1), ("stderr", 2))


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


def fill_descriptors() -> None:
    """Give this process the standard streams that it was started without (`>&-`).

    Their numbers would become those of other files, into which C libraries then write.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest that is free is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in OUTPUTS:
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False),
                                                line_buffering=True))


def outlive_console() -> None:
    """From now on what stdout or stderr doesn't take is dropped, and stops nothing.

    Streams that somebody has put in the place of Python's own are left alone.
    """
    for name, number in OUTPUTS:
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError):
            old.flush()
        binary = io.BufferedWriter(_Console(number, "w", closefd=False))
        setattr(sys, name, _Stream(binary, old.encoding, old.errors, line_buffering=True))


def say(text: str, stream: TextIO | None = None) -> None:
    """Write to a stream, by default stderr, in whose place a task may have put one that is closed,
    or none."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream = stream or sys.stderr
        stream.write(text)
        stream.flush()


class _Stream(io.TextIOWrapper):
    """Stays open where a task, or a library, closes it."""

    def close(self) -> None:
        self.flush()


class _Console(io.FileIO):
    """Drops what can't be written."""

    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


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
