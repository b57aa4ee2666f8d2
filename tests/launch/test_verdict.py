"""Which exit of a rank is the cause, and what follows from it."""

from __future__ import annotations

import time

import pytest

from launch.exit_policy import Exit, decide, first_failure

KILL, TERM = -9, -15


def ends(*codes: int | None) -> list[Exit]:
    """Exits of one rank per code, in this order, at intervals of one second."""
    return [Exit(rank=n, code=code, at_s=float(n)) for n, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "code", "restart", "cause"),
    [
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
        ((1, 76), 76, False, 1),
        ((1, 1, 77), 77, False, 2),
        ((KILL, 75), 1, True, 0),
        ((None, None), 1, True, 0),
    ],
)
def test_the_first_exit_that_is_not_secondary_decides(
    codes: tuple[int | None, ...], code: int, restart: bool, cause: int | None
) -> None:
    decision = decide(ends(*codes))

    assert (decision.code, decision.restart) == (code, restart)
    assert (decision.cause and decision.cause.rank) == cause


def test_an_exit_forced_by_the_launcher_is_not_the_cause() -> None:
    forced = Exit(rank=1, code=KILL, at_s=1.0, forced=True)

    decision = decide([forced, Exit(rank=0, code=1, at_s=2.0)])

    assert decision.cause
    assert decision.cause.rank == 0


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((75, 75), 75),
        ((0, 0), 0),
        ((75, 1), 75),
        ((KILL, 75), 75),
        ((TERM, TERM), 75),
        ((1, 1), 1),
        ((77, 1), 77),
        ((None, None), 1),
    ],
)
def test_after_a_stop_request_nothing_restarts_and_saved_means_75(
    codes: tuple[int | None, ...], code: int
) -> None:
    decision = decide(ends(*codes), stop_at_s=-1.0)

    assert (decision.code, decision.restart) == (code, False)


def test_a_failure_just_before_the_stop_request_would_have_been_restarted() -> None:
    assert decide(ends(KILL, 1), stop_at_s=0.5).code == 75


def failure(rank: int, age_s: float, *, secondary: bool = False) -> dict:
    place = {"attempt": 4, "rank": rank, "step": 11, "phase": "train", "failed_step": 12}
    return {**place, "time": time.time() - age_s, "event": "failure", "echo": secondary,
            "why": "ValueError: x"}  # fmt: skip


def died(rank: int, age_s: float, code: int | None) -> Exit:
    return Exit(rank=rank, code=code, at_s=time.monotonic() - age_s)


@pytest.mark.parametrize(("events", "rank"), [
    ([failure(0, 3), failure(1, 5), failure(2, 9, secondary=True)], 1), ([failure(0, 3)], 0)])
def test_the_first_failure_is_the_earliest_reported_by_a_rank(events: list, rank: int) -> None:
    found = first_failure(died(0, 2, 1), events, attempt=4, reached_step=11)

    assert found is not None
    assert found["rank"] == rank


def test_an_unreported_death_becomes_an_event_with_the_step_reported_by_peers() -> None:
    events = [failure(0, 1, secondary=True)]

    found = first_failure(died(1, 2, KILL), events, attempt=4, reached_step=3)

    assert found is not None
    assert (found["event"], found["rank"], found["failed_step"]) == ("death", 1, 12)
    assert found["why"] == "was killed by SIGKILL"


def test_an_exception_before_a_death_is_the_cause_and_after_it_is_not() -> None:
    before = first_failure(died(1, 2, KILL), [failure(0, 5)], attempt=4, reached_step=3)
    after = first_failure(died(1, 2, KILL), [failure(0, 1)], attempt=4, reached_step=3)

    assert before is not None
    assert after is not None
    assert (before["rank"], after["rank"]) == (0, 1)


@pytest.mark.parametrize(("code", "attempt"), [
    (None, 4), (2, 4), (75, 4), (76, 4), (77, 4),  # reported by the trainer itself
    (KILL, None),  # before the run knows its attempt
])
def test_no_death_is_recorded(code: int | None, attempt: int | None) -> None:
    assert first_failure(died(0, 2, code), [], attempt=attempt, reached_step=3) is None
