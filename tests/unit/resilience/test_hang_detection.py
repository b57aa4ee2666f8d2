"""Limits, and the judgement over what ranks tell of themselves."""

from __future__ import annotations

import dataclasses
import math

import pytest

from trainer.resilience.fault_injection import PHASES
from trainer.resilience.hang_detection import (
    RECENT_STEPS,
    HangReport,
    Pace,
    Peer,
    RankReport,
    find_hang,
    name_place,
)
from trainer.resilience.progress_marks import Place
from trainer.telemetry.status import Phase


def report(*, waits: bool = False, over: bool = False, idle_s: float = 5.0) -> RankReport:
    return RankReport(phase="forward", step=7, idle_s=idle_s, waits=waits, over=over)


WORKS, STUCK = report(), report(over=True)
WAITS, WAITS_LONG = report(waits=True), report(waits=True, over=True)


def peer(told: RankReport | None, silent_s: float = 0.0) -> Peer:
    return Peer(report=told, silent_s=silent_s)


@pytest.mark.parametrize(("own", "peers", "culprits"), [
    (WORKS, [peer(WAITS_LONG)], None),
    (STUCK, [peer(STUCK)], (0,)),
    (STUCK, [], (0,)),  # a world of one
    (WAITS_LONG, [peer(WORKS)], None),  # the other one validates, saves, compiles
    (WAITS_LONG, [peer(STUCK)], (1,)),
    (WAITS_LONG, [peer(WAITS)], None),
    (WAITS_LONG, [peer(WAITS_LONG)], ()),
    (WAITS_LONG, [peer(WAITS_LONG), peer(WORKS)], None),
    (WAITS_LONG, [peer(WAITS_LONG), peer(STUCK)], (2,)),
    (WAITS, [peer(WORKS, silent_s=9.0)], None),
    (WAITS, [peer(WORKS, silent_s=11.0)], (1,)),
    (WAITS, [peer(None, silent_s=11.0)], (1,)),
    (WAITS_LONG, [peer(None)], None),  # nothing heard so far
    (WAITS_LONG, [peer(WAITS_LONG, silent_s=11.0), peer(STUCK, silent_s=12.0)], (1, 2)),
    (WORKS, [peer(WORKS, silent_s=99.0)], None),  # who works will come to wait for it
])
def test_whose_fault_it_is(own, peers, culprits):
    hang = find_hang(0, own, dict(enumerate(peers, 1)), limit_s=10.0)

    assert (None if hang is None else hang.culprits) == culprits
    if hang is not None and any(p.silent_s > 10.0 for p in peers):
        assert not hang.run


@pytest.mark.parametrize(("phase", "remedy"), [
    ("backward", "call it on every rank"), ("evaluate", "sums and counts")])
def test_a_collective_of_the_user_in_which_a_rank_waits_is_named_with_the_remedy(phase, remedy):
    gathers = dataclasses.replace(WAITS_LONG, phase=phase, collective="all_gather (mine.py:7)")

    hang = find_hang(0, WAITS_LONG, {1: peer(gathers)}, limit_s=10.0)

    assert hang is not None
    assert hang.why.startswith("all ranks wait for each other: rank 1 in all_gather (mine.py:7)")
    assert remedy in hang.why


@pytest.mark.parametrize(("host", "culprits"), [(0, (0,)), (None, ()), (1, ())])
def test_a_store_that_does_not_answer_speaks_against_its_host(host, culprits):
    hang = find_hang(1, WAITS, {0: peer(WORKS)}, limit_s=10.0, store_silent_s=11.0, store_host=host)

    assert isinstance(hang, HangReport)
    assert (hang.culprits, hang.run) == (culprits, False)
    assert find_hang(1, WORKS, {0: peer(WORKS)}, limit_s=10.0, store_silent_s=11.0) is None


def test_the_quiet_time_follows_the_limit_but_users_code_has_minutes_at_the_start():
    for phase, point, times in (("train", "reading", 1), ("build", "start", 2),
                                ("warm-up", "data", 2), ("restore", "restore", 2),
                                ("evaluate", "step-end", 2), ("save", "save-mid", 2)):
        assert Pace(2.0).patience(Phase(phase), Phase(point)).quiet_s == 2.0 * times
    for phase, point in (("build", "build"), ("warm-up", "start"), ("warm-up", "reading")):
        allowed = Pace(2.0).patience(Phase(phase), Phase(point))
        assert (allowed.quiet_s >= 120, allowed.idle_s) == (True, math.inf)
    for phase, point, quiet_s in (("save", "save", 1800), ("finish", "save", 1800),
                                  ("finish", "evaluate", 60), ("evaluate", "save", 60)):
        assert Pace(None).patience(Phase(phase), Phase(point)).quiet_s == quiet_s
    assert Pace(30.0).patience(Phase("build"), Phase("build")).flag == "--watchdog.start-s 300"
    assert Pace(30.0, 20.0).patience(Phase("build"), Phase("build")).quiet_s == 20.0
    assert Pace(30.0, 20.0).patience(Phase("build"), Phase("start")).flag == (
        "--watchdog.limit-s 30")


def test_places_have_the_names_that_faults_have():
    told = [("build", "start"), ("restore", "restore"), ("evaluate", "step-end"),
            ("train", "reading"), *(("train", p) for p in PHASES)]

    assert {name_place(*map(Phase, place)) for place in told} == set(PHASES)
    assert name_place(Phase.WARM_UP, Phase.READING) == "data"
    assert name_place(Phase.WARM_UP, Phase.WARM_UP) == "warm-up"


# --- the limit that is learnt

def walk(pace: Pace, pauses: list[float], *, phase: Phase = Phase.TRAIN, step: int = 1) -> float:
    """The limit after pauses of these lengths, one a step, each looked at when it ends."""
    now = 1000.0 * step
    for count, pause_s in enumerate(pauses):
        place = Place(Phase.FORWARD, step + count, now)
        pace.see(place, phase, now)
        now += pause_s
        pace.see(place, phase, now)
    return pace.see(Place(Phase.FORWARD, step + len(pauses), now), phase, now)


def test_the_limit_is_ten_times_the_longest_recent_pause_and_at_least_thirty_seconds():
    assert walk(Pace(None), [0.1, 2.0, 0.1]) == 30.0
    assert walk(Pace(None), [0.1, 9.0, 0.1]) == 90.0
    assert walk(Pace(2.5), [0.1, 9.0, 0.1]) == 2.5
    for phase in (Phase.EVALUATE, Phase.WARM_UP):
        assert walk(Pace(None), [60.0, 60.0], phase=phase) == 30.0


def test_a_pause_that_lasts_does_not_move_its_own_limit_and_is_forgotten_after_some_steps():
    pace = Pace(None)
    walk(pace, [4.0])
    place = Place(Phase.FORWARD, 2, 5000.0)
    assert [pace.see(place, Phase.TRAIN, 5000.0 + s) for s in (1, 50, 500)] == [40.0] * 3

    pace = Pace(None)
    assert walk(pace, [20.0]) == 200.0
    assert walk(pace, [1.0] * RECENT_STEPS, step=2) == 200.0

    assert walk(pace, [1.0] * RECENT_STEPS, step=2 + RECENT_STEPS) == 30.0
