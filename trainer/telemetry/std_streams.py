"""Standard streams that fail: a closed pipe (`| head`), a closed terminal, a full disk."""

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
"""Exit code that a shell reports for a program killed by SIGPIPE."""

OUTPUTS = (("stdout", 1), ("stderr", 2))


@contextlib.contextmanager
def quiet_broken_pipe() -> Iterator[None]:
    """Context in which a broken pipe of stdout or stderr is not reported. Exits with EXIT_PIPE if
    one interrupts the block; if only the final flush fails, the exit code remains."""
    try:
        yield
    except BrokenPipeError:
        if not any(map(_has_no_reader, (sys.stdout, sys.stderr))):
            raise  # of another pipe, so it is an ordinary error
        raise SystemExit(EXIT_PIPE) from None
    finally:  # flush, so that the interpreter does not report a broken pipe when it exits
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fill_descriptors() -> None:
    """Open the standard streams that this process was started without (`>&-`): C libraries that
    print would write into the files that get their descriptors."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # os.open returns the lowest free descriptor: this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, number in OUTPUTS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


def ignore_output_errors() -> None:
    """From now on drop output that Python's stdout or stderr cannot write, without an error."""
    for name, number in OUTPUTS:
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError):
            old.flush()
        binary = io.BufferedWriter(_LossyFile(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(binary, old.encoding, old.errors, line_buffering=True))


def say(text: str, stream: TextIO | None = None) -> None:
    """Write to a stream, by default stderr; ignore errors, since a task may have closed it."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        stream = stream or sys.stderr
        stream.write(text)
        stream.flush()


class _LossyFile(io.FileIO):
    """A file that drops the data that cannot be written."""

    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _has_no_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
