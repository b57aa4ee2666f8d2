"""What the launcher shows: its own lines, and the output of ranks other than 0, tagged."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

CLEAR_LINE = b"\r\x1b[K"
CHUNK_BYTES = 1 << 16


class Output:
    """Copies the output of tagged ranks line by line; rank 0 has the terminal, and its bar, itself.

    Each pipe has a thread that reads it to its end, so a killed rank's last words are not lost.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._last: str | None = None

    def say(self, text: str) -> None:
        """A line of the launcher itself, on stderr."""
        self._write(sys.stderr.fileno(), f"launch: {text}\n".encode(errors="backslashreplace"))

    def say_last(self, text: str) -> None:
        """The last line of all, once the ranks' output is copied."""
        self._last = text

    def follow(self, fd: int, *, tag: str, to_fd: int) -> None:
        """Copy what comes out of `fd` to `to_fd`, `tag` before each line; close it at its end."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._copy, args=(fd, tag.encode(), to_fd), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is copied, or until `timeout_s` has passed."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        last, self._last = self._last, None  # a second Ctrl-C comes here amid the first one's line
        if last is not None:
            self.say(last)

    def _copy(self, fd: int, tag: bytes, to_fd: int) -> None:
        rest = b""
        while chunk := os.read(fd, CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            self._write(to_fd, b"".join(_tagged(line, tag) for line in lines))
        if rest:
            self._write(to_fd, _tagged(rest, tag))
        os.close(fd)

    def _write(self, fd: int, data: bytes) -> None:
        # A reader that has gone (`| head`) must not stop the run: what it doesn't want is dropped.
        with self._lock, contextlib.suppress(OSError):
            if data and os.isatty(fd):
                data = CLEAR_LINE + data  # rank 0's progress bar may be there; it comes back
            while data:
                data = data[os.write(fd, data) :]


def _tagged(line: bytes, tag: bytes) -> bytes:
    # The trainer tags its own lines, in the same way, where no launcher does it.
    return (line if line.startswith(tag) else tag + line) + b"\n"
