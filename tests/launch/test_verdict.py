"""Which exit of a rank is the cause, and what follows from it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from launch.exit_policy import Exit, decide, first_failure

KILL, TERM = -9, -15


def ends(*codes: int | None) -> list[Exit]:
    """Exits of one rank per code, in this order, at intervals of one second."""
    return [Exit(rank=n, code=code, at_s=float(n)) for n, code in enumerate(codes)]


@pytest.mark.parametrize(("codes", "code", "restart", "cause"), [
    ((0, 0), 0, False, None),
    ((KILL, 1, 1), 1, True, 0),
    ((1, KILL, 1), 1, True, 1),
    ((1, 1), 1, True, 0),
    ((3, KILL), 1, True, 0),
    ((0, 1), 1, True, 1),
    ((2, 1), 2, False, 0),
    ((1, 2), 2, False, 1),
    ((75, 75), 75, False, 0),
    ((0, 75), 75, False, 1),
    ((1, 1, 77), 77, False, 2),
    ((KILL, 75), 1, True, 0),
    ((None, None), 1, True, 0),
])
def test_the_first_exit_that_is_not_secondary_decides(codes, code, restart, cause):
    decision = decide(ends(*codes))

    assert (decision.code, decision.restart) == (code, restart)
    assert (decision.cause and decision.cause.rank) == cause


def test_an_exit_forced_by_the_launcher_is_not_the_cause() -> None:
    forced = Exit(rank=1, code=KILL, at_s=1.0, forced=True)

    decision = decide([forced, Exit(rank=0, code=1, at_s=2.0)])

    assert decision.cause
    assert decision.cause.rank == 0


@pytest.mark.parametrize(("codes", "stop_at_s", "code"), [
    ((75, 75), -1, 75),
    ((0, 0), -1, 0),
    ((75, 1), -1, 75),
    ((KILL, 75), -1, 75),
    ((TERM, TERM), -1, 75),
    ((1, 1), -1, 1),
    ((77, 1), -1, 77),
    ((None, None), -1, 1),
    ((KILL, 1), 0.5, 75),  # a failure just before the stop request would have been restarted
])
def test_after_a_stop_request_nothing_restarts_and_saved_means_75(codes, stop_at_s, code):
    decision = decide(ends(*codes), stop_at_s=stop_at_s)

    assert (decision.code, decision.restart) == (code, False)


def failure(rank: int, age_s: float, *, secondary: bool = False) -> dict[str, Any]:
    return {"attempt": 4, "rank": rank, "step": 11, "phase": "train", "failed_step": 12,
            "time": time.time() - age_s, "event": "failure", "echo": secondary,
            "why": "ValueError: x"}


@pytest.mark.parametrize(("dead", "code", "reports", "rank"), [
    # The earliest that a rank has reported,
    (0, 1, [(0, 30), (1, 50)], 1),
    (0, 1, [(0, 30)], 0),
    # unless a rank died before it.
    (1, KILL, [(0, 50)], 0),
    (1, KILL, [(0, 10)], 1),
])
def test_the_first_failure(dead, code, reports, rank):
    died = Exit(rank=dead, code=code, at_s=time.monotonic() - 20)
    events = [failure(2, 90, secondary=True), *(failure(*report) for report in reports)]

    found = first_failure(died, events, attempt=4, reached_step=11)

    assert found is not None
    assert found["rank"] == rank


@pytest.mark.parametrize(("code", "attempt", "why"), [
    (KILL, 4, "was killed by SIGKILL"), (-40, 4, "was killed by signal 40"),
    (3, 4, "exited with code 3"),
    (None, 4, None), (2, 4, None), (75, 4, None), (76, 4, None),  # the trainer has reported it
    (KILL, None, None),  # before the run knows its attempt
])
def test_an_unreported_death_becomes_an_event_with_the_step_reported_by_peers(code, attempt, why):
    died = Exit(rank=1, code=code, at_s=time.monotonic() - 2)

    found = first_failure(died, [failure(0, 1, secondary=True)], attempt=attempt, reached_step=3)

    assert (found and found["why"]) == why
    if found is not None:
        assert (found["event"], found["rank"], found["failed_step"]) == ("death", 1, 12)
