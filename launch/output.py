"""The launcher's terminal output: its own lines, and the tagged output of ranks other than 0."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

CLEAR_LINE = b"\r\x1b[K"
CHUNK_BYTES = 1 << 16


class Output:
    """Copies the output of tagged ranks line by line; rank 0 writes to the terminal directly. A
    thread per pipe reads to end of file, so the last output of a killed rank is not lost."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._last: str | None = None  # line that `finish` prints

    def print_line(self, text: str) -> None:
        self._write(sys.stderr.fileno(), f"launch: {text}\n".encode(errors="backslashreplace"))

    def set_last_line(self, text: str) -> None:
        self._last = text

    def follow(self, fd: int, *, tag: str, to_fd: int) -> None:
        """Copy lines from `fd` to `to_fd` with `tag` before each; close `fd` at end of file."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._copy, args=(fd, tag.encode(), to_fd), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self, timeout_s: float) -> None:
        """Wait until all output is copied or `timeout_s` has passed, then print the last line."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        # Reset first: a second Ctrl-C calls this again while the line is being printed.
        last, self._last = self._last, None
        if last is not None:
            self.print_line(last)

    def _copy(self, fd: int, tag: bytes, to_fd: int) -> None:
        rest = b""
        while chunk := os.read(fd, CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:  # a line without an end
                lines, rest = [*lines, rest], b""
            self._write(to_fd, b"".join(_tagged(line, tag) for line in lines))
        if rest:
            self._write(to_fd, _tagged(rest, tag))
        os.close(fd)

    def _write(self, fd: int, data: bytes) -> None:
        # A reader that has exited (`| head`) must not stop the run: further output is dropped.
        with self._lock, contextlib.suppress(OSError):
            if data and os.isatty(fd):
                data = CLEAR_LINE + data  # erase rank 0's progress bar; rank 0 redraws it
            while data:
                data = data[os.write(fd, data) :]


def _tagged(line: bytes, tag: bytes) -> bytes:
    # The trainer tags its own lines in the same format if no launcher does it.
    return (line if line.startswith(tag) else tag + line) + b"\n"
