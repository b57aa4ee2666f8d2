"""Decide from the ranks' reports whether the run hangs, and who causes it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.telemetry.status import PREPARING, Phase

LEAST_S = 30.0
"""Shortest learnt limit inside steps; a shorter one has to be set by the flag."""

TIMES_LONGEST = 10.0
"""The learnt limit, as a multiple of the longest recent pause inside steps."""

START_S = 300.0
"""How long a rank may be inactive while it builds and warms up: user code may wait there for a
network, a download or a licence."""

BUSY_S, BUSY_TIMES = 600.0, 10.0
"""How long a rank may compute in a step without a mark: seconds, or multiples of the limit."""

LONG_S = 1800.0
"""The same outside of steps: as long as ranks wait for each other there."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What a phase allows before it counts as a hang, in seconds."""

    quiet_s: float
    """Without a mark and without activity: no processor time, no bytes read or written."""
    idle_s: float
    """Without a mark, however active."""
    flag: str = ""
    """The flag that sets this time, with its current value."""


def learnt_limit(longest_pause_s: float) -> float:
    """The limit inside steps, in seconds, from the longest recent pause between two marks."""
    return max(LEAST_S, TIMES_LONGEST * longest_pause_s)


def patience(
    phase: Phase, point: Phase | None, limit_s: float, start_s: float | None = None
) -> Patience:
    """What the main thread of a rank is allowed.

    Args:
        phase: stage of the attempt.
        point: last progress mark; it says where in the stage the rank is.
        limit_s: limit inside steps.
        start_s: limit while the rank builds and warms up; None: a long one.
    """
    flag = f"--watchdog.limit-s {limit_s:g}"
    if phase is Phase.TRAIN:
        return Patience(quiet_s=limit_s, idle_s=max(BUSY_S, BUSY_TIMES * limit_s), flag=flag)
    starting = phase in PREPARING - {Phase.RESTORE}
    past_user_code = (phase, point) in ((Phase.BUILD, Phase.START), (Phase.WARM_UP, Phase.DATA))
    if starting and not past_user_code:
        quiet_s = max(START_S, 2 * limit_s) if start_s is None else start_s
        return Patience(quiet_s=quiet_s, idle_s=math.inf, flag=f"--watchdog.start-s {quiet_s:g}")
    return Patience(quiet_s=2 * limit_s, idle_s=max(LONG_S, BUSY_TIMES * limit_s), flag=flag)


def saving_patience(limit_s: float) -> Patience:
    """What the checkpoint writer is allowed."""
    return Patience(quiet_s=2 * limit_s, idle_s=max(LONG_S, BUSY_TIMES * limit_s))


def name_place(phase: Phase, point: Phase | None) -> str:
    """Name of a main thread's place: the mark where the stage has several, else the stage."""
    precise = phase is Phase.TRAIN or (phase, point) in (
        (Phase.BUILD, Phase.START), (Phase.WARM_UP, Phase.DATA), (Phase.WARM_UP, Phase.READING))
    if point is None or not precise:
        return phase.value
    return (Phase.DATA if point is Phase.READING else point).value


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank reports with each heartbeat."""

    phase: str
    step: int
    idle_s: float
    """Seconds since its last progress mark."""
    waits: bool
    """Whether it waits for other ranks, in a collective."""
    over: bool
    """Whether its phase allows no longer pause."""
    saving: str = ""
    """Where its checkpoint writer is, if that is at work."""
    dumped: bool = False
    """Whether it has written its stacks."""
    flag: str = ""
    """See `Patience`."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What is known of another rank: its last report, and for how long it has sent none."""

    report: Report | None
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """A hang. Without culprits, all ranks wait for each other or for a store that is silent."""

    culprits: tuple[int, ...]
    why: str
    run: bool = True
    """Whether the culprits can run code, and so end themselves."""


def find_hang(
    rank: int, own: Report, peers: Mapping[int, Peer], *, limit_s: float,
    store_silent_s: float = 0.0, store_host: int | None = None,
) -> HangReport | None:  # fmt: skip
    """Decide whether the run hangs, and which ranks cause it; None: it does not hang.

    A rank that does not wait for others decides about itself. A rank that waits looks at the
    others: a silent rank does not run; a rank that is over its own limit and waits for nobody is
    the culprit. While any rank is within its limit, the others are right to wait for it.

    Args:
        store_silent_s: for how long the store of heartbeats has not answered.
        store_host: rank whose process hosts the store; None: the launcher.
    """
    if own.over and not own.waits:
        return HangReport(culprits=(rank,), why="makes no progress")
    if not own.waits:
        return None
    if store_silent_s > limit_s:
        culprits = () if store_host in (None, rank) else (store_host,)
        return HangReport(culprits=culprits, run=False, why="sends no heartbeat" if culprits else
                       "the store of heartbeats does not answer")
    silent = tuple(r for r, peer in peers.items() if peer.silent_s > limit_s)
    if silent:
        return HangReport(culprits=silent, run=False, why="sends no heartbeat")
    if not own.over:
        return None
    reports = {r: peer.report for r, peer in peers.items() if peer.report is not None}
    if len(reports) < len(peers) or not all(report.over for report in reports.values()):
        return None
    stuck = tuple(r for r, report in reports.items() if not report.waits)
    if stuck:
        return HangReport(culprits=stuck, why="makes no progress")
    return HangReport(culprits=(), why="all ranks wait for each other")
