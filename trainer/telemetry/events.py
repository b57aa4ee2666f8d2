"""Rank-tagged console lines, and the event log `events.jsonl`; one write per line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from trainer.storage.jsonl import AppendFile, read_records
from trainer.storage.records import (
    Kind,
    is_count,
    is_flag,
    is_number,
    is_positive,
    is_seconds,
    is_text,
    optional,
    table_of,
)
from trainer.storage.secrets import mask
from trainer.telemetry.status import Phase, Status
from trainer.telemetry.std_streams import say

LEVELS = ("debug", "info", "warning", "error")
COLOURS = {"warning": 33, "error": 31}
"""Terminal colours of the level before a line: yellow, red."""

EVENT = Kind(
    known={
        "time": is_seconds, "attempt": is_count, "rank": is_count, "step": is_count,
        **dict.fromkeys(("event", "nonce", "node", "phase", "kind", "fault", "error", "hint",
                         "label", "at_phase", "failed_phase"), is_text),
        **dict.fromkeys(("why", "where", "what", "launch", "version"), optional(is_text)),
        **dict.fromkeys(("at_step", "to_step", "bytes", "pid"), is_count),
        **dict.fromkeys(("failed_step", "culprit", "reached"), optional(is_count)),
        **dict.fromkeys(("seconds", "idle_s", "lag_s", "mb_per_s"), is_seconds),
        "echo": is_flag, "entered": table_of(is_seconds), "exit_code": is_number,
        "world_size": is_positive})
"""A line of events.jsonl: the entries that readers use."""
ALWAYS = frozenset(("time", "attempt", "rank", "step", "event"))
"""Entries of each event of a run."""

_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (
    *range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)
) if chr(code) not in "\n\t"}
"""Escapes for characters that move the cursor, colour or clear a terminal, or reverse its text."""


class Log:
    """Log of one rank: lines for people on stderr, events for programs in the run folder. Ranks
    other than 0 have their number before each line, and no info lines."""

    def __init__(self, rank: int = 0, *, level: str = "info", stream: TextIO | None = None
                 ) -> None:  # fmt: skip
        self.rank, self.status = rank, Status()
        self.attempt, self.nonce = 0, ""
        self.folder: Path | None = None  # the run folder, once events are open
        self._line_writer: Callable[[str], None] | None = None  # set while there is a progress bar
        self._stream = stream
        self._events: AppendFile | None = None
        self._early: list[dict[str, Any]] = []
        # Start time of each phase until the first step; `python -m launch` gives its own.
        self._entered: dict[str, float] | None = json.loads(
            os.environ.get("TRAINER_LAUNCH_PHASES", "{}"))
        self._note_phase(self.status.phase)
        self.status.on_phase(self._note_phase)
        self.status.on_step(self._note_step)
        self.set_level(level)

    def _note_phase(self, phase: Phase) -> None:
        if self._entered is not None:
            self._entered.setdefault(phase, round(time.time(), 6))

    def _note_step(self, _: int) -> None:
        """At an attempt's first step, record when each phase before it began (seconds since the
        epoch), and the processor time of this process."""
        entered, self._entered = self._entered, None
        if entered is not None:
            self.event("first-step", entered=entered, cpu_s=round(time.process_time(), 3))

    def write_lines_by(self, writer: Callable[[str], None] | None) -> None:
        """Write console lines by `writer`, such as a progress bar's; None: to the stream."""
        self._line_writer = writer

    def set_level(self, level: str) -> None:
        """Show lines of this level and above."""
        self._threshold = LEVELS.index(level)

    def info(self, text: str) -> None:
        self._line("info", text)

    def warning(self, text: str) -> None:
        self._line("warning", text)

    def warn_once(self, text: str) -> None:
        """Log a warning that is the same on all ranks; only rank 0 prints it."""
        if self.rank == 0:
            self.warning(text)

    def error(self, text: str) -> None:
        self._line("error", text)

    def open_events(self, path: Path, *, attempt: int, nonce: str) -> None:
        """Append events to `path` from now on, after the events recorded before this call."""
        self.attempt, self.nonce = attempt, nonce
        self._events, self.folder = AppendFile(path), path.parent
        for line in self._early:
            self._write_event({**line, "attempt": attempt, "nonce": nonce})
        self._early.clear()

    def event(self, event: str, **fields: Any) -> dict[str, Any]:
        """Record an event, in one write; return it."""
        line = {
            "time": round(time.time(), 6), "attempt": self.attempt, "nonce": self.nonce,
            "node": socket.gethostname(), "rank": self.rank, "step": self.status.step,
            "phase": self.status.phase, "event": event,
            **{name: writable(value) for name, value in fields.items()},
        }  # fmt: skip
        if self._events is None:
            self._early.append(line)
        else:
            self._write_event(line)
        return line

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(OSError):  # events lost by a full disk must not fail the run
                events.close()

    def _write_event(self, line: dict[str, Any]) -> None:
        assert self._events is not None
        with contextlib.suppress(OSError):  # the next event tries again
            if self._events.damage and self._events.restore(others=True) == "removed":
                self.warning("another process has removed events.jsonl during the run; it is "
                             "written again")
        self._events.append((json.dumps(line) + "\n").encode())

    def _line(self, level: str, text: str) -> None:
        number = LEVELS.index(level)
        if number < self._threshold or (self.rank != 0 and number < LEVELS.index("warning")):
            return
        stream = self._stream or sys.stderr
        mark = "" if level in ("info", "debug") else f"{level}: "
        if mark and _has_colours(stream):
            mark = f"\x1b[{COLOURS[level]}m{mark}\x1b[0m"
        tag, text = f"[rank {self.rank}] " if self.rank != 0 else "", writable(text)
        if self._line_writer is not None:
            self._line_writer(f"{tag}{mark}{text}")
        else:  # one write per line, so that the lines of several ranks don't mix
            say(f"{tag}{mark}{text}\n", stream)


def _has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal and colours are enabled (https://no-color.org)."""
    with contextlib.suppress(AttributeError, ValueError):  # no stream, or a closed one
        return (not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
                and stream.isatty())
    return False


def writable(value: Any) -> Any:
    """A string as it is shown and recorded: terminal control codes and names that are not UTF-8 are
    escaped, and secrets are masked."""
    if not isinstance(value, str):
        return value
    return mask(value).translate(_CONTROLS).encode(errors="backslashreplace").decode()


def read_events(*paths: Path, tell: Callable[[str], object] = len) -> list[dict[str, Any]]:
    """All events of one or, if nodes have their own disks, several files, by attempt. Of an attempt
    they have the order of each file, since a clock may be set back; files are merged by time.
    `tell` is called with a message about lines that are none."""
    events: list[tuple[int, float, dict[str, Any]]] = []
    for path in paths:
        latest = dict[int, float]()  # attempt → the largest time so far in this file
        for record in read_records(path, kind=EVENT, tell=tell):
            attempt, time_s = record.get("attempt", -1), record.get("time", 0.0)
            latest[attempt] = max(latest.get(attempt, time_s), time_s)
            events.append((attempt, latest[attempt], record))
    return [record for *_, record in sorted(events, key=lambda event: event[:2])]
