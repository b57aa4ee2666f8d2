"""Timing of the steps on each rank (timing.jsonl), and the slow rank or loader that it shows."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.storage.jsonl import AppendFile
from trainer.storage.records import (
    Kind,
    is_count,
    is_number,
    is_positive,
    is_seconds,
    list_of,
    optional,
)

PARTS = ("step", "data", "compute", "communication", "save", "memory_mb")
"""Values of each rank in a line: seconds summed over its steps, and memory at its end. The rest of
`step` is time of the host; `save` is partly between steps."""
EVERY_S, GROWTH, LONGEST_S = 1.0, 0.01, 60.0
"""Interval of the lines: GROWTH × the age of the attempt, from EVERY_S to LONGEST_S."""
NOTICED, WAITING = 0.1, 0.2
"""A slow rank, or the loader, is reported if it costs more than this share of a step."""
IN_A_ROW = 3
"""Consecutive lines that must show it. The first line is ignored: it includes startup effects."""

Totals = list[float]
"""A rank's sums so far: [number of steps, step, samples, seconds since the epoch, *PARTS]."""
_HEAD = 4
"""Values of the totals before those of `PARTS`."""
_SECONDS = tuple(f"{part}_s" for part in PARTS[:-1])


def _is_of_ranks(line: Mapping[str, Any]) -> bool:
    """Whether all lists have the same number of ranks, and the times of rank 0 are known."""
    return all(len(line[name]) == len(line["memory_mb"]) and line[name][0] is not None
               for name in _SECONDS)


TIMING_LINE = Kind(
    needed={"time": is_seconds, "attempt": is_count, "step": is_count, "steps": is_positive,
            "samples": is_count,
            **dict.fromkeys(_SECONDS, list_of(optional(is_seconds), least=1)),
            "memory_mb": list_of(optional(is_number))},
    whole=_is_of_ranks)
"""A line of timing.jsonl."""


class StepTiming:
    """Sums the times of this rank's steps; rank 0 writes the lines of all ranks, which it receives
    with the heartbeats.

    `add` is called by the main thread, `message` and `collect` by the thread of the heartbeats. A
    rank has `workers` loader processes, `cores` processors for itself, and `memory()` in MB.
    """

    def __init__(
        self, *, rank: int = 0, size: int = 1, attempt: int = 0, workers: int = 0, cores: int = 1,
        warn: Callable[[str], None], memory: Callable[[], float],
    ) -> None:
        self._rank, self._size, self._attempt, self._warn = rank, size, attempt, warn
        self._workers, self._cores, self._memory = workers, cores, memory
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._count = self._samples = 0
        self._totals: Totals = [0.0] * (_HEAD + len(PARTS))  # replaced as a whole by each step
        self._base = [self._totals] * size  # of the last line
        self._file: AppendFile | None = None
        self._began_s = self._next_s = time.monotonic()
        self._last = time.time()
        self._seen: dict[str, int] = {}  # problem → consecutive lines that show it
        self._warned: set[str] = set()
        self._lines = 0
        self._lock = threading.Lock()

    def open(self, path: Path) -> None:
        """Write lines from now on; on rank 0."""
        self._file = AppendFile(path)
        self._began_s, self._last = time.monotonic(), time.time()
        self._next_s = self._began_s + EVERY_S

    def add(self, step: int, times: Mapping[str, float], *, samples: int,
            blocked_s: float) -> None:
        """Add the times of a step, and the seconds of saves that blocked this rank so far."""
        sums = self._sums
        for part, seconds in times.items():
            sums[part] += seconds
        self._count += 1
        self._samples += samples
        sums["save"] = blocked_s
        self._totals = [self._count, step, self._samples, time.time(), *sums.values()]
        if self._size == 1 and self._file is not None and self.due:
            self.collect([self.message()])

    @property
    def due(self) -> bool:
        """Whether the interval of the lines has passed."""
        return time.monotonic() >= self._next_s

    def message(self) -> Totals:
        """The totals of this rank, with its current memory."""
        return [*(round(value, 6) for value in self._totals[:-1]), self._memory()]

    def collect(self, messages: Sequence[Totals]) -> None:
        """Write a line from the messages of all ranks, in order of rank, once each has made a step
        since the last line; on rank 0."""
        with self._lock:
            if self._file is not None and all(
                    own[0] > base[0] for own, base in zip(messages, self._base, strict=True)):
                line = self._line(messages)
                self._base = list(messages)
                self._check(line)

    def close(self) -> None:
        """Write this rank's last steps, with None for the other ranks, and close the file."""
        with self._lock:
            file = self._file
            if file is None:
                return
            if self._count > self._base[self._rank][0]:
                self._line([self.message() if r == self._rank else None
                            for r in range(self._size)])
            self._file = None
        with contextlib.suppress(OSError):  # the run does not need this file
            file.close()

    def _line(self, ends: Sequence[Totals | None]) -> dict[str, Any]:
        """Write a line. Ranks publish at different times: the seconds of each are those of its own
        steps since the last line, scaled to the number of this rank's."""
        own, base = ends[self._rank], self._base[self._rank]
        assert own is not None
        assert self._file is not None
        steps = own[0] - base[0]
        line: dict[str, Any] = {
            "time": round(own[3], 6), "attempt": self._attempt, "step": int(own[1]),
            "steps": int(steps), "samples": int(own[2] - base[2]),
            "wall_s": round(own[3] - self._last, 6),
        }  # fmt: skip
        for i, part in enumerate(PARTS[:-1], start=_HEAD):
            line[f"{part}_s"] = [
                None if end is None else
                round(max(0.0, end[i] - before[i]) * steps / (end[0] - before[0]), 6)
                for end, before in zip(ends, self._base, strict=True)]
        line["memory_mb"] = [None if end is None else end[-1] for end in ends]
        self._file.append((json.dumps(line) + "\n").encode())
        self._last, now_s = own[3], time.monotonic()
        self._next_s = now_s + min(LONGEST_S, max(EVERY_S, GROWTH * (now_s - self._began_s)))
        self._lines += 1
        return line

    def _check(self, line: dict[str, Any]) -> None:
        """Warn once about a problem that several consecutive lines show."""
        if self._lines == 1 or line["steps"] < 2 or not min(line["step_s"]):
            return
        problems = _slow_rank(line) | self._slow_loader(line)
        self._seen = {name: self._seen.get(name, 0) + 1 for name in problems}
        for name, text in problems.items():
            if self._seen[name] >= IN_A_ROW and name not in self._warned:
                self._warned.add(name)
                self._warn(text)

    def _slow_loader(self, line: Mapping[str, Any]) -> dict[str, str]:
        """A warning if waiting for data takes more than `WAITING` of a rank's steps."""
        share, rank = max((data / step, rank) for rank, (step, data) in enumerate(
            zip(line["step_s"], line["data_s"], strict=True)))
        if share <= WAITING:
            return {}
        step, data = (line[f"{part}_s"][rank] / line["steps"] for part in ("step", "data"))
        more = min(max(2, 2 * self._workers), max(2, self._cores))
        remedy = f"--data.workers {more}" if more > self._workers else (
            "cheaper samples (smaller files, less to decode), or more processors for each rank")
        of_rank = f", rank {rank}" if self._size > 1 else ""
        return {"data": f"your loader is the bottleneck: {share:.0%} of each step waits for data "
                        f"({_ms(data)} of {_ms(step)}{of_rank}); try {remedy}"}


def own_step_s(line: Mapping[str, Any]) -> list[float]:
    """Each rank's seconds for its steps, without waiting for the other ranks."""
    return [step - waited for step, waited in
            zip(line["step_s"], line["communication_s"], strict=True)]


def _slow_rank(line: Mapping[str, Any]) -> dict[str, str]:
    """A warning if the other ranks wait for one more than `NOTICED` of a step."""
    own = own_step_s(line)
    slowest, rank = max((seconds, rank) for rank, seconds in enumerate(own))
    others = statistics.median([s for r, s in enumerate(own) if r != rank] or own)
    share = (slowest - others) / max(line["step_s"])  # as if all others had the median
    if share <= NOTICED:
        return {}
    count, data = line["steps"], line["data_s"][rank]
    for_data = f" ({_ms(data / count)} of it for data)" if data > 0.2 * slowest else ""
    return {f"slow {rank}": f"rank {rank} holds the others back: it needs {_ms(slowest / count)} a "
                            f"step{for_data}, they {_ms(others / count)}: {share:.0%} of each step "
                            "is spent on waiting for it"}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def resident_mb() -> float:
    """The resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
