"""Where the time of the steps goes, rank by rank: each adds up its own, rank 0 gathers them beside
the training (`heartbeats`) into `timing.jsonl`, and names what holds the run up.
"""

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

from trainer.append import AppendFile

PARTS = ("step", "data", "compute", "communication", "save", "memory_mb")
"""What is told of each rank: seconds added up over a line's steps, and its memory at their end.
`save` is what saves held the training up, partly between steps; the rest of `step` is the host's
own."""

MARKS, RECENT_S = 32, 5.0
"""So many marks, of so recent steps, are told: ranks tell at different moments, and are compared at
a step that each of them has told of."""

EVERY_S, GROWTH, LONGEST_S = 1.0, 0.01, 60.0
"""A line at most each second, later each hundredth of the attempt's age, in the end each minute."""

NOTICED = 0.1
"""The share of a step that a slow rank must cost the others to be named."""
WAITING = 0.2
"""The share of a step that waits for data to be called the bottleneck."""

IN_A_ROW = 3
"""Lines that must show it, after the first one, which has the start's effects."""

Mark = list[float]
"""Sums at a step: [steps, the step, samples, when it was made, *PARTS]."""
_HEAD = 4


class Timing:
    """This rank's sums, at steps that all ranks pass; on rank 0 also everybody's lines.

    Args:
        tell: shows a sentence to people (rank 0).
        workers, cores: loader processes of a rank, and processors that it has to itself.
        memory: of this rank, in MB.
        clock: seconds, monotonic; `now`: since the epoch.

    Attributes:
        add: by the main thread; `message` and `collect` by the heartbeats'.
    """

    def __init__(
        self, *, rank: int = 0, size: int = 1, attempt: int = 0, workers: int = 0, cores: int = 1,
        tell: Callable[[str], None] = lambda text: None, memory: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._rank, self._size, self._attempt, self._tell = rank, size, attempt, tell
        self._workers, self._cores = workers, cores
        self._memory, self._clock, self._now = memory or resident_mb, clock, now
        self._sums = dict.fromkeys((*PARTS, "held"), 0.0)
        self._count = self._samples = self._step = 0
        self._held_s = 0.0
        self._stride, self._marks = 1, list[Mark]()
        self._file: AppendFile | None = None
        self._began_s = self._next_s = clock()
        self._last = now()
        self._base: list[Mark] = [[0.0] * (_HEAD + len(PARTS))] * size  # of the line before
        self._seen: dict[str, int] = {}  # in how many lines in a row
        self._said: set[str] = set()
        self._lines = 0
        self._lock = threading.Lock()

    def open(self, path: Path) -> None:
        """Rank 0: write lines from now on."""
        torn = path.exists() and path.stat().st_size > 0
        self._file = AppendFile(path)
        if torn:  # maybe within a line; empty ones are no lines
            self._file.append(b"\n")
        self._began_s, self._last = self._clock(), self._now()
        self._next_s = self._began_s + EVERY_S

    def add(self, step: int, times: Mapping[str, float], *, samples: int, held_s: float) -> None:
        """A step is made.

        Args:
            times: of `Metrics.step`.
            held_s: how long saves have held up this rank between steps so far.
        """
        sums = self._sums
        for part, seconds in times.items():
            sums[part] += seconds
        self._count += 1
        self._samples += samples
        self._step, self._held_s = step, held_s
        if self._count % self._stride:
            return
        mark, marks = self._mark(), self._marks
        if len(marks) >= MARKS:
            marks = [m for m in marks if m[3] > mark[3] - RECENT_S]
            if len(marks) >= MARKS / 2:  # ranks may differ in their strides: some steps are in all
                self._stride *= 2
                marks = [m for m in marks if m[0] % self._stride == 0]
            self._marks = marks
        marks.append(mark)
        if self._size == 1 and self._file is not None and self.due:
            self.collect([self.message()])

    def _mark(self) -> Mark:
        sums = self._sums
        sums["save"] = sums["held"] + self._held_s
        return [self._count, self._step, self._samples, self._now(), *(sums[p] for p in PARTS)]

    @property
    def due(self) -> bool:
        """Whether it is time for another line."""
        return self._clock() >= self._next_s

    def message(self) -> list[Mark]:
        """This rank's newest marks, for rank 0, with its memory as it is now."""
        memory = self._memory()
        return [[*(round(value, 6) for value in mark[:-1]), memory] for mark in self._marks]

    def collect(self, told: Sequence[list[Mark]]) -> None:
        """Rank 0: what the ranks have told, by rank. None of them waits for this."""
        with self._lock:
            by_count = [{int(mark[0]): mark for mark in marks} for marks in told]
            common = set.intersection(*(set(marks) for marks in by_count))
            newest = max(common, default=0)
            if self._file is None or newest <= self._base[self._rank][0]:
                return
            ends = [marks[newest] for marks in by_count]
            line = self._line(ends)
            self._base = list(ends)
            self._judge(line)

    def close(self) -> None:
        """Write what this rank knows of its last steps (the others are None), and close."""
        with self._lock:
            file = self._file
            if file is None:
                return
            if self._count > self._base[self._rank][0]:
                mark = [*self._mark()[:-1], self._memory()]
                self._line([mark if r == self._rank else None for r in range(self._size)])
            self._file = None
        with contextlib.suppress(OSError):  # of no use to the run
            file.close()

    def _line(self, ends: Sequence[Mark | None]) -> dict[str, Any]:
        own, base = ends[self._rank], self._base[self._rank]
        assert own is not None
        assert self._file is not None
        line: dict[str, Any] = {
            "time": round(own[3], 6), "attempt": self._attempt, "step": int(own[1]),
            "steps": int(own[0] - base[0]), "samples": int(own[2] - base[2]),
            "wall_s": round(own[3] - self._last, 6),
        }  # fmt: skip
        for i, part in enumerate(PARTS[:-1], start=_HEAD):
            line[f"{part}_s"] = [None if end is None else round(max(0.0, end[i] - before[i]), 6)
                                 for end, before in zip(ends, self._base, strict=True)]
        line["memory_mb"] = [None if end is None else end[-1] for end in ends]
        self._file.append((json.dumps(line) + "\n").encode())
        self._file.flush()  # what a full disk held up before
        self._last, now_s = own[3], self._clock()
        self._next_s = now_s + min(LONGEST_S, max(EVERY_S, GROWTH * (now_s - self._began_s)))
        self._lines += 1
        return line

    def _judge(self, line: dict[str, Any]) -> None:
        """Say what several lines in a row show, once."""
        if self._lines == 1 or line["steps"] < 2:
            return
        slow, waits = slowest(line), waits_most(line)
        found = {}
        if slow is not None:
            found[f"slow {slow[0]}"] = slow_sentence(line, *slow)
        if waits is not None:
            found["data"] = data_sentence(line, *waits, workers=self._workers, cores=self._cores)
        self._seen = {what: self._seen.get(what, 0) + 1 for what in found}
        for what, text in found.items():
            if self._seen[what] >= IN_A_ROW and what not in self._said:
                self._said.add(what)
                self._tell(text)


def own_s(line: Mapping[str, Any]) -> list[float]:
    """What each rank itself needed: its steps without its waiting for the others."""
    return [step - waited for step, waited in
            zip(line["step_s"], line["communication_s"], strict=True)]


def slowest(line: Mapping[str, Any]) -> tuple[int, float] | None:
    """(the rank, the share of each step that the others wait for it), where that is worth a word.

    The others would go as fast as the median of them does.
    """
    if len(line["step_s"]) < 2 or None in line["step_s"]:
        return None
    own = own_s(line)
    rank = max(range(len(own)), key=own.__getitem__)
    others = statistics.median(o for r, o in enumerate(own) if r != rank)
    share = (own[rank] - others) / max(line["step_s"])
    return (rank, share) if share > NOTICED else None


def waits_most(line: Mapping[str, Any]) -> tuple[int, float] | None:
    """(the rank, the share of its steps that waits for data), where that is the bottleneck."""
    if None in line["step_s"] or not min(line["step_s"]):
        return None
    shares = [data / step for data, step in zip(line["data_s"], line["step_s"], strict=True)]
    rank = max(range(len(shares)), key=shares.__getitem__)
    return (rank, shares[rank]) if shares[rank] > WAITING else None


def slow_sentence(line: Mapping[str, Any], rank: int, share: float) -> str:
    """A slow rank, in figures."""
    own, count = own_s(line), line["steps"]
    others = statistics.median(o for r, o in enumerate(own) if r != rank)
    data = line["data_s"][rank]
    of_it = f" ({_ms(data / count)} of it for data)" if data > 0.2 * own[rank] else ""
    return (f"rank {rank} holds the others back: it needs {_ms(own[rank] / count)} a step{of_it}, "
            f"they {_ms(others / count)}: {share:.0%} of each step is spent on waiting for it")


def data_sentence(
    line: Mapping[str, Any], rank: int, share: float, *, workers: int, cores: int
) -> str:
    """A slow loader, in figures, and what to try."""
    step, data = (line[f"{part}_s"][rank] / line["steps"] for part in ("step", "data"))
    more = min(max(2, 2 * workers), max(2, cores))
    remedy = f"--data.workers {more}" if more > workers else (
        "cheaper samples (smaller files, less to decode), or more processors for each rank")
    who = f", rank {rank}" if len(line["step_s"]) > 1 else ""
    return (f"your loader is the bottleneck: {share:.0%} of each step waits for data "
            f"({_ms(data)} of {_ms(step)}{who}); try {remedy}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def resident_mb() -> float:
    """Memory of this process that is in RAM; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
