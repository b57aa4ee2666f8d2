"""Who holds the run up: the judgement over what the ranks tell of themselves. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.status import PREPARING, Phase

LEAST_S = 30.0
"""The shortest limit that is learnt; a shorter one has to be asked for."""

TIMES_LONGEST = 10.0
"""The limit that is learnt: so many times the longest recent pause inside the steps."""

START_S = 300.0
"""How long a rank may stand quite still while it builds and warms up: the user's own code may wait
there for a network, a download, a licence."""

BUSY_S, BUSY_TIMES = 600.0, 10.0
"""How long a rank may compute inside a step without getting on: seconds, or times the limit."""

LONG_S = 1800.0
"""The same outside of steps: as long as ranks wait for each other there."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What is allowed in a phase before it counts as a hang, in seconds."""

    quiet_s: float
    """Without getting on and without doing anything: no processor time, nothing read or written."""
    idle_s: float
    """Without getting on, however busy."""
    flag: str = ""
    """The flag, and its value, that would allow another time."""


def learnt_limit(longest_pause_s: float) -> float:
    """The limit inside steps, from the longest pause between two points of the recent ones."""
    return max(LEAST_S, TIMES_LONGEST * longest_pause_s)


def patience(
    phase: Phase, point: Phase | None, limit_s: float, start_s: float | None = None
) -> Patience:
    """What is allowed to a main thread.

    Args:
        phase: stage of the attempt.
        point: last progress mark; it says where in the stage the rank is.
        limit_s: inside of steps.
        start_s: while it builds and warms up; None: long.
    """
    flag = f"--watchdog.limit-s {limit_s:g}"
    if phase is Phase.TRAIN:
        return Patience(quiet_s=limit_s, idle_s=max(BUSY_S, BUSY_TIMES * limit_s), flag=flag)
    starting = phase in PREPARING - {Phase.RESTORE}
    own_code = (phase, point) in ((Phase.BUILD, Phase.START), (Phase.WARM_UP, Phase.DATA))
    if starting and not own_code:
        quiet_s = max(START_S, 2 * limit_s) if start_s is None else start_s
        return Patience(quiet_s=quiet_s, idle_s=math.inf, flag=f"--watchdog.start-s {quiet_s:g}")
    return Patience(quiet_s=2 * limit_s, idle_s=max(LONG_S, BUSY_TIMES * limit_s), flag=flag)


def saving_patience(limit_s: float) -> Patience:
    """What is allowed to the checkpoint's writer."""
    return Patience(quiet_s=2 * limit_s, idle_s=max(LONG_S, BUSY_TIMES * limit_s))


def shown(phase: Phase, point: Phase | None) -> str:
    """Name of a main thread's place: the mark where the stage has several, else the stage."""
    precise = phase is Phase.TRAIN or (phase, point) in (
        (Phase.BUILD, Phase.START), (Phase.WARM_UP, Phase.DATA), (Phase.WARM_UP, Phase.READING))
    if point is None or not precise:
        return phase.value
    return (Phase.DATA if point is Phase.READING else point).value


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank tells of itself, with each heartbeat."""

    phase: str
    step: int
    idle_s: float
    """Since it has last got on."""
    waits: bool
    """For other ranks: in a collective."""
    over: bool
    """Whether that is longer than its phase allows."""
    saving: str = ""
    """Where the writer of a checkpoint is at the same time, if it is at work."""
    dumped: bool = False
    """Whether its stacks are written."""
    flag: str = ""
    """See `Patience`."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What is known of another rank: its last report, and how long there has been none since."""

    report: Report | None
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A hang. No culprits: all ranks wait for each other, or for a store that doesn't answer."""

    culprits: tuple[int, ...]
    why: str
    run: bool = True
    """Whether the culprits run, so that they end themselves."""


def judge(
    rank: int, own: Report, peers: Mapping[int, Peer], *, limit_s: float,
    store_silent_s: float = 0.0, store_host: int | None = None,
) -> Verdict | None:  # fmt: skip
    """Whether the run hangs, and by whose fault, as this rank sees it; None: it doesn't.

    A rank that doesn't wait for others speaks for itself. One that waits looks at the others: who
    is silent doesn't run; who is over its own limit and waits for nobody is the one. As long as
    some rank is within its limit, all others wait rightly.

    Args:
        store_silent_s: how long the store of heartbeats hasn't answered.
        store_host: the rank whose process hosts it; None: the launcher.
    """
    if own.over and not own.waits:
        return Verdict(culprits=(rank,), why="gets no further")
    if not own.waits:
        return None
    if store_silent_s > limit_s:
        culprits = () if store_host in (None, rank) else (store_host,)
        return Verdict(culprits=culprits, run=False, why="gives no sign of life" if culprits else
                       "the store of heartbeats doesn't answer")
    silent = tuple(r for r, peer in peers.items() if peer.silent_s > limit_s)
    if silent:
        return Verdict(culprits=silent, run=False, why="gives no sign of life")
    if not own.over:
        return None
    reports = {r: peer.report for r, peer in peers.items() if peer.report is not None}
    if len(reports) < len(peers) or not all(report.over for report in reports.values()):
        return None
    stuck = tuple(r for r, report in reports.items() if not report.waits)
    if stuck:
        return Verdict(culprits=stuck, why="gets no further")
    return Verdict(culprits=(), why="all ranks wait for each other")
