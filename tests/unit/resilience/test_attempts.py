"""Attempts that failed at the same step, read from a run's events."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.resilience.attempts import failure_sentence, read_attempts, repeated_failures


def event(attempt: int, name: str, *, rank: int = 0, step: int = 0, **fields: Any) -> dict:
    return {"time": float(attempt), "attempt": attempt, "rank": rank, "step": step,
            "phase": "train", "event": name, **fields}


def start(attempt: int, *, reached: int = 0, launch: str | None = "a", version: str = "v") -> dict:
    return event(attempt, "start", world_size=2, launch=launch, version=version, reached=reached)


def failure(attempt: int, failed_step: int, **fields: Any) -> dict:
    return event(attempt, "failure", failed_step=failed_step, echo=False, why="ValueError: x",
                 **fields)


def count(*events: dict, version: str = "v") -> int:
    return len(repeated_failures(read_attempts(events), version=version))


def test_failures_at_the_same_step_are_counted_from_the_newest() -> None:
    assert count() == 0
    assert count(start(0), failure(0, 12), start(1), failure(1, 12)) == 2
    assert count(start(0), failure(0, 12), start(1), failure(1, 13)) == 1
    assert count(start(0), failure(0, 12), start(1), failure(1, 13), start(2), failure(2, 12)) == 1


@pytest.mark.parametrize("evidence", [
    event(1, "lost-peer", failed_step=12), event(1, "death", failed_step=12, why="was killed"),
    event(1, "hang", step=12), event(1, "failure", echo=True, failed_step=12),
    event(1, "stop", step=12, exit_code=1, error="SaveFailed")])
def test_events_of_survivors_launchers_and_watchdogs_are_evidence(evidence: dict) -> None:
    assert count(start(0), failure(0, 12), start(1), evidence) == 2


def test_a_preempted_attempt_is_ignored() -> None:
    events = [start(0), failure(0, 12), start(1, launch="b"), start(2, launch="c"), failure(2, 12)]

    assert count(*events) == 2
    assert count(start(0, launch="a"), start(1, launch="b"), start(2, launch="c")) == 0
    assert count(start(0, launch=None), start(1, launch=None), start(2, launch=None)) == 0


def test_an_attempt_that_its_launcher_outlived_counts_as_failed() -> None:
    events = [start(0), start(1, reached=11), start(2, reached=11)]

    assert count(*events) == 2  # the newest may have been preempted
    assert count(*events, start(3, reached=11)) == 3
    assert count(*events, start(3, reached=17), start(4, reached=17)) == 2


@pytest.mark.parametrize("end", [
    event(1, "stop", exit_code=75), event(1, "stop", exit_code=76), event(1, "end"),
    event(1, "refused")])
def test_a_stop_an_end_and_giving_up_reset_the_count(end: dict) -> None:
    events = [start(0), failure(0, 12), start(1), end, start(2), failure(2, 12)]

    assert count(*events) == 1


def test_failures_of_another_version_do_not_count() -> None:
    events = [start(0), failure(0, 12), start(1), failure(1, 12)]

    assert count(*events, version="w") == 0
    assert count(*events, start(2, version="w"), failure(2, 12), version="w") == 1


def test_a_superseded_orphan_has_not_failed() -> None:
    gone = event(0, "stop", exit_code=1, error="StaleAttempt")

    assert count(start(0), gone, start(1, launch="b"), failure(1, 12)) == 1


def test_the_cause_of_an_attempt_is_its_first_primary_failure() -> None:
    events = [start(0), event(0, "lost-peer", failed_step=12), failure(0, 12, rank=1),
              failure(0, 12, rank=2), event(0, "failure", rank=3, echo=True, failed_step=12)]

    [attempt] = read_attempts(events)

    assert attempt.cause is events[2]
    assert failure_sentence(attempt.cause) == "rank 1, step 12 (train), attempt 0: ValueError: x"


def test_two_attempts_of_lost_disks_may_have_the_same_number() -> None:
    first, second = (start(1) | {"nonce": nonce} for nonce in "ab")
    death = event(1, "death", failed_step=12, why="was killed")  # the launcher knows no nonce

    attempts = read_attempts([first, event(1, "stop", exit_code=75, nonce="a"), second, death])

    assert [(a.number, a.nonce, a.end) for a in attempts] == [(1, "a", "stopped"), (1, "b", "died")]
    assert attempts[1].cause is death
