"""Reasons to skip a step, and consecutive bad steps."""

from __future__ import annotations

import json

import pytest

from trainer.checkpoint.progress import TrainProgress
from trainer.config.schema import BadStepConfig
from trainer.optim.bad_step_check import (
    EMPTY,
    HISTORY,
    MIN_HISTORY,
    NONFINITE,
    OVERFLOW,
    SPIKE,
    Health,
)

NAN, INF = float("nan"), float("inf")


def check(health: Health | None = None, loss=8.0, count=8.0, norm=1.0, scale=None) -> str:
    """Reason to skip a step; a step without one is applied."""
    health = health or Health(BadStepConfig())
    reason = health.reason_to_skip(loss=loss, count=count, norm=norm, scale=scale)
    if not reason:
        health.remember(loss=loss, count=count)
    return reason


@pytest.mark.parametrize(("values", "reason"), [
    ({}, ""),
    ({"norm": 0.0}, ""),
    ({"loss": NAN}, NONFINITE),
    ({"loss": -INF}, NONFINITE),
    ({"norm": INF}, NONFINITE),
    ({"count": NAN}, NONFINITE),
    ({"count": 0.0, "loss": 0.0, "norm": NAN}, EMPTY),
    ({"count": 0.0, "loss": NAN}, NONFINITE),
    # A scale that can still fall is not an error. The loss itself is not scaled.
    ({"norm": INF, "scale": 65536.0}, OVERFLOW),
    ({"norm": INF, "scale": 1.0}, NONFINITE),
    ({"loss": INF, "scale": 65536.0}, NONFINITE)])
def test_reduced_values_decide_whether_a_step_is_skipped(values, reason):
    assert check(**values) == reason


def test_a_loss_far_above_recent_ones_is_a_spike_if_enabled():
    strict, off = Health(BadStepConfig(spike_z=5)), Health(BadStepConfig())
    for n in range(MIN_HISTORY - 1):
        assert check(strict, 8.0 + 0.1 * (n % 7)) == check(off, 8.0 + 0.1 * (n % 7)) == ""

    assert check(strict, 100.0) == ""  # the history is too short
    assert check(strict, 100.0) == check(strict, 16.0) == SPIKE  # not added to it
    assert check(strict, 1.0) == ""  # downward jumps are fine
    assert check(strict, 8.9) == ""
    assert check(off, 1e9) == ""


def test_the_history_is_restored_exactly_and_has_a_limit():
    health, other = Health(BadStepConfig(spike_z=5)), Health(BadStepConfig(spike_z=5))
    for n in range(2 * HISTORY):
        check(health, 8.0 + 0.1 * (n % 7))

    other.load_state_dict(json.loads(json.dumps(health.state_dict())))

    assert other.state_dict() == health.state_dict()
    assert len(health.state_dict()["losses"]) == HISTORY


def test_consecutive_bad_steps_end_with_the_current_step():
    progress = TrainProgress()

    def rows(bad: list[int], excluded: list[int] = (), upto: int = 9) -> list[list[int]]:
        progress.bad, progress.excluded_steps = bad, list(excluded)
        found = []
        for progress.step in range(upto + 1):
            found.append(progress.consecutive_bad_steps)
        return found

    assert rows([3, 4, 7])[3:9] == [[3], [3, 4], [], [], [7], []]
    # Excluded steps neither count nor interrupt the sequence.
    assert rows([3, 4, 6, 7], [3, 4])[3:9] == [[], [], [], [6], [6, 7], []]
    assert rows([3, 4, 5, 6], [3, 4])[3:7] == [[], [], [5], [5, 6]]


def test_a_repeated_bad_step_counts_once():
    progress = TrainProgress()

    for step in (4, 5, 4):
        progress.note_skipped(step, bad=True)
    progress.note_skipped(6)

    assert (progress.bad, progress.skipped) == ([4, 5], 4)
