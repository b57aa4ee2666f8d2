"""Rank-tagged console lines, and `events.jsonl`: what happened, one write a line."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")


class Log:
    """The voice of one rank: lines for people on stderr, events for programs in the run folder.

    Args:
        rank: written before each line of ranks other than 0, whose info lines are dropped.
        level: the least level that is shown.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        rank: int = 0,
        *,
        level: str = "info",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rank = rank
        self.attempt = 0
        self.nonce = ""
        self.step = 0
        self.phase = "start"
        self.echo: Callable[[str], None] | None = None  # set while a progress bar owns the line
        self._threshold = LEVELS.index(level)
        self._stream = stream
        self._clock = clock
        self._events: int | None = None
        self._waiting: list[bytes] = []

    def debug(self, text: str) -> None:
        self._line("debug", text)

    def info(self, text: str) -> None:
        self._line("info", text)

    def warning(self, text: str) -> None:
        self._line("warning", text)

    def error(self, text: str) -> None:
        self._line("error", text)

    def open_events(self, path: Path, *, attempt: int, nonce: str) -> None:
        """Append events to `path` from now on; those noted before are written first."""
        self.attempt, self.nonce = attempt, nonce
        self._events = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._flush()

    def event(self, event: str, **fields: Any) -> None:
        """Note an event. A full disk delays it: it waits in memory for the next one."""
        line = {
            "time": round(self._clock(), 6),
            "attempt": self.attempt,
            "nonce": self.nonce,
            "node": socket.gethostname(),
            "rank": self.rank,
            "step": self.step,
            "phase": self.phase,
            "event": event,
            **fields,
        }
        self._waiting.append((json.dumps(line) + "\n").encode())
        self._flush()

    def close(self) -> None:
        """Write what still waits and close the file of events."""
        if self._events is not None:
            self._flush()
            os.close(self._events)
            self._events = None

    def _flush(self) -> None:
        while self._events is not None and self._waiting:
            line = self._waiting[0]
            try:
                written = os.write(self._events, line)
            except OSError:
                return  # no space: kept, in order, for the next event
            if written < len(line):
                # A disk that fills in mid-line: end the torn line so that readers can skip it,
                # and write the event anew.
                self._waiting[0] = b"\n" + line.lstrip(b"\n")
                return
            self._waiting.pop(0)

    def _line(self, level: str, text: str) -> None:
        number = LEVELS.index(level)
        if number < self._threshold or (self.rank != 0 and number < LEVELS.index("warning")):
            return
        mark = "" if level in ("info", "debug") else f"{level}: "
        tag = f"[rank {self.rank}] " if self.rank != 0 else ""
        if self.echo is not None:
            self.echo(f"{tag}{mark}{text}")
        else:
            # One write a line, so that the lines of several ranks don't mix.
            stream = self._stream or sys.stderr
            stream.write(f"{tag}{mark}{text}\n")
            stream.flush()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole events of a run folder's `events.jsonl`, in time's order."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # a line torn by a crash of the machine
    return sorted((e for e in events if isinstance(e, dict)), key=lambda e: e.get("time", 0.0))
