"""Decide from all ranks' reports whether the run hangs, and which rank causes it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.resilience.progress_marks import Place
from trainer.storage.processes import Activity
from trainer.telemetry.status import PREPARING, Phase

RECENT_STEPS = 64
LEAST_S = 30.0  # shortest learnt limit inside steps; a shorter one has to be set by the flag
TIMES_LONGEST = 10.0  # the learnt limit, as a multiple of the longest recent pause inside steps
START_S = 300.0  # inactivity allowed at the start: user code may wait for a network or a licence
BUSY_S, BUSY_TIMES = 600.0, 10.0  # computing without a mark in a step: seconds, times the limit
LONG_S = 1800.0  # the same outside of steps: as long as ranks wait for each other there
BETWEEN_STEPS = (Phase.STEP_END, Phase.SAVE, Phase.EVALUATE)
PAST_USER_CODE = ((Phase.BUILD, Phase.START), (Phase.WARM_UP, Phase.DATA))
"""(phase, last mark) of a start that runs no code of the user which may wait for long."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of a phase, in seconds; a longer pause counts as a hang."""

    quiet_s: float  # without a mark, processor time, and bytes read or written
    idle_s: float  # without a mark, even with activity
    flag: str  # that sets this time, with its current value

    def is_exceeded(self, idle_s: float, quiet_s: float) -> bool:
        return quiet_s > self.quiet_s or idle_s > self.idle_s


class Pace:
    """The time limits of a rank. That inside steps, `limit_s`, is fixed, or learnt (None) from the
    pauses between their marks; `start_s` holds at the start (None: long)."""

    def __init__(self, limit_s: float | None, start_s: float | None = None) -> None:
        self._fixed_s, self._start_s = limit_s, start_s
        self._longest_s, self._before_s = 0.0, 0.0  # in this stretch of steps, in the last one
        self._stretch = 0
        self._pause = (0.0, 0.0)  # when it began, how long it has been so far

    @property
    def limit_s(self) -> float:
        learnt_s = max(LEAST_S, TIMES_LONGEST * max(self._longest_s, self._before_s))
        return learnt_s if self._fixed_s is None else self._fixed_s

    def see(self, place: Place, phase: Phase, now: float) -> float:
        """Record the place of the main thread; return the limit. The shortest limit allows for
        pauses between two calls, which are missed."""
        began_s, length_s = self._pause
        if place.at_s != began_s:  # a pause counts when it is over
            self._longest_s = max(self._longest_s, length_s)
            self._pause = (place.at_s, 0.0)
        if phase is Phase.TRAIN and place.point not in BETWEEN_STEPS:
            self._pause = (place.at_s, now - place.at_s)
        if place.step - self._stretch >= RECENT_STEPS or place.step < self._stretch:
            self._stretch = place.step
            self._before_s, self._longest_s = self._longest_s, 0.0
        return self.limit_s

    def patience(self, phase: Phase, point: Phase | None = None) -> Patience:
        """Time limits of the main thread in a stage and after its last mark, or of the checkpoint
        writer (in `Phase.SAVE`). A learnt limit says nothing about the disk, which alone can be
        slow where no code of the user runs."""
        limit_s, flag = self.limit_s, f"--watchdog.limit-s {self.limit_s:g}"
        if phase is Phase.TRAIN:
            return Patience(quiet_s=limit_s, idle_s=max(BUSY_S, BUSY_TIMES * limit_s), flag=flag)
        if phase in PREPARING - {Phase.RESTORE} and (phase, point) not in PAST_USER_CODE:
            quiet_s = max(START_S, 2 * limit_s) if self._start_s is None else self._start_s
            return Patience(quiet_s=quiet_s, idle_s=math.inf,
                            flag=f"--watchdog.start-s {quiet_s:g}")
        only_disk = self._fixed_s is None and Phase.EVALUATE not in (phase, point)
        return Patience(quiet_s=LONG_S if only_disk else 2 * limit_s,
                        idle_s=max(LONG_S, BUSY_TIMES * limit_s), flag=flag)


class QuietTime:
    """For how long this process, or the checkpoint writer's thread, has been inactive."""

    def __init__(self, *, of_writer: bool = False) -> None:
        self._of_writer = of_writer
        self._activity: Activity | None = None

    def measure(self, idle_s: float, limit_s: float) -> float:
        """Seconds without activity, of `idle_s` without a mark; looks from `limit_s / 4` on."""
        if idle_s <= limit_s / 4:
            self._activity = None
            return idle_s
        if self._activity is None:
            writer = next((t.native_id for t in threading.enumerate()
                           if t.name.startswith("checkpoint-writer")), None)
            self._activity = Activity(os.getpid(), thread=writer if self._of_writer else None)
        return min(idle_s, self._activity.quiet_s())


def name_place(phase: Phase, point: Phase | None) -> str:
    """Name of a main thread's place: the mark if the stage has several, otherwise the stage."""
    point = Phase.DATA if point is Phase.READING else point
    precise = phase is Phase.TRAIN or (phase, point) in PAST_USER_CODE
    return (point if point is not None and precise else phase).value


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank reports with each heartbeat."""

    phase: str
    step: int
    idle_s: float  # seconds since its last progress mark
    waits: bool  # for other ranks, in a collective
    over: bool  # it exceeds a time limit of its phase
    saving: str = ""  # position of its checkpoint writer; empty if the writer is idle
    dumped: bool = False  # it has written its stacks
    flag: str = ""  # the flag that sets that limit, with its value
    collective: str = ""  # in which it waits, if user code has called it


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another rank: its last report, and for how long it has sent none."""

    report: RankReport | None
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class HangReport:
    culprits: tuple[int, ...]  # empty: all wait for each other, or the store does not answer
    why: str
    run: bool = True  # whether the culprits can run code, and so end themselves


def find_hang(
    rank: int, own: RankReport, peers: Mapping[int, Peer], *, limit_s: float,
    store_silent_s: float = 0.0, store_host: int | None = None,
) -> HangReport | None:
    """Decide whether the run hangs, and which ranks cause it; None: it does not hang.

    A rank that does not wait for others decides about itself. A rank that waits looks at the
    others: a silent one does not run; one that is over its own limit and waits for nobody is the
    culprit. While any rank is within its limit, the others may wait for it. `store_host` is the
    rank that hosts the store of heartbeats (None: the launcher).
    """
    if not own.waits:
        return HangReport(culprits=(rank,), why="makes no progress") if own.over else None
    if store_silent_s > limit_s:
        culprits = () if store_host in (None, rank) else (store_host,)
        return HangReport(culprits=culprits, run=False, why="sends no heartbeat" if culprits else
                          "the store of heartbeats does not answer")
    if silent := tuple(r for r, peer in peers.items() if peer.silent_s > limit_s):
        return HangReport(culprits=silent, run=False, why="sends no heartbeat")
    if not own.over or not all(peer.report and peer.report.over for peer in peers.values()):
        return None
    if stuck := tuple(r for r, peer in peers.items() if peer.report and not peer.report.waits):
        return HangReport(culprits=stuck, why="makes no progress")
    reports = {rank: own, **{r: peer.report for r, peer in peers.items() if peer.report}}
    return HangReport(culprits=(), why="all ranks wait for each other" + next(
        (f": rank {r} in {_explain_collective(report)}" for r, report in sorted(reports.items())
         if report.collective), ""))


def _explain_collective(report: RankReport) -> str:
    """Name the collective of user code in which a rank waits, and the remedy."""
    if report.phase not in (Phase.EVALUATE, Phase.FINISH):
        return f"{report.collective}, which other ranks have not called: call it on every rank"
    return (f"{report.collective}, which other ranks call less often: their numbers of validation "
            "batches differ. Let loss() return sums and counts (metrics, table), which are added "
            "up over all ranks, without a collective of its own")
