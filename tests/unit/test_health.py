"""What makes a step bad, and which bad steps are in a row."""

from __future__ import annotations

import json

import pytest

from trainer.config import Nonfinite
from trainer.errors import ConfigError
from trainer.health import EMPTY, HISTORY, LEAST, NONFINITE, OVERFLOW, SPIKE, Health
from trainer.progress import Progress

NAN, INF = float("nan"), float("inf")


def judge(health: Health | None = None, loss=8.0, count=8.0, norm=1.0, scale=None) -> str:
    """The verdict on a step, which is made where nothing speaks against it."""
    health = health or Health(Nonfinite())
    verdict = health.judge(loss=loss, count=count, norm=norm, scale=scale)
    if not verdict:
        health.remember(loss=loss, count=count)
    return verdict


@pytest.mark.parametrize(("values", "verdict"), [
    ({}, ""),
    ({"norm": 0.0}, ""),
    ({"loss": NAN}, NONFINITE),
    ({"loss": -INF}, NONFINITE),
    ({"norm": INF}, NONFINITE),
    ({"count": NAN}, NONFINITE),
    ({"count": 0.0, "loss": 0.0, "norm": NAN}, EMPTY),
    ({"count": 0.0, "loss": NAN}, NONFINITE),
    # A scaler that can still fall is looking for its scale; a loss isn't scaled.
    ({"norm": INF, "scale": 65536.0}, OVERFLOW),
    ({"norm": INF, "scale": 1.0}, NONFINITE),
    ({"loss": INF, "scale": 65536.0}, NONFINITE),
])  # fmt: skip
def test_a_step_is_judged_by_its_reduced_values(values, verdict):
    assert judge(**values) == verdict


def test_a_loss_far_above_the_recent_ones_is_a_spike_where_that_is_asked_for():
    strict, off = Health(Nonfinite(spike_z=5)), Health(Nonfinite())
    losses = [8.0 + 0.1 * (n % 7) for n in range(LEAST)]

    for loss in losses:
        assert judge(strict, loss) == judge(off, loss) == ""

    assert judge(strict, 16.0) == SPIKE
    assert judge(strict, 1.0) == ""  # lower is no harm
    assert judge(strict, 8.9) == ""
    assert judge(off, 1e9) == ""


def test_a_spike_needs_losses_to_be_measured_against_and_is_none_of_them():
    health = Health(Nonfinite(spike_z=5))
    for n in range(LEAST - 1):
        judge(health, 8.0 + 0.1 * (n % 7))

    assert judge(health, 100.0) == ""
    assert judge(health, 100.0) == SPIKE
    assert judge(health, 100.0) == SPIKE


def test_the_losses_come_back_exactly_and_only_the_recent_ones():
    health, other = Health(Nonfinite(spike_z=5)), Health(Nonfinite(spike_z=5))
    for n in range(2 * HISTORY):
        judge(health, 8.0 + 0.1 * (n % 7))

    other.load_state_dict(json.loads(json.dumps(health.state_dict())))

    assert other.state_dict() == health.state_dict()
    assert len(health.state_dict()["losses"]) == HISTORY


def test_bad_steps_in_a_row_are_those_up_to_this_one():
    progress = Progress()

    def rows(bad: list[int], left_out: list[int] = (), upto: int = 9) -> list[list[int]]:
        progress.bad, progress.left_out = bad, list(left_out)
        found = []
        for progress.step in range(upto + 1):
            found.append(progress.bad_row)
        return found

    assert rows([3, 4, 7])[3:9] == [[3], [3, 4], [], [], [7], []]
    # What is left out neither counts nor ends a row.
    assert rows([3, 4, 6, 7], [3, 4])[3:9] == [[], [], [], [6], [6, 7], []]
    assert rows([3, 4, 5, 6], [3, 4])[3:7] == [[], [], [5], [5, 6]]


def test_a_bad_step_that_is_met_again_counts_once():
    progress = Progress()

    for step in (4, 5, 4):
        progress.note_skipped(step, bad=True)
    progress.note_skipped(6)

    assert (progress.bad, progress.skipped) == ([4, 5], 4)


@pytest.mark.parametrize("field", ["max_in_row", "max_total", "spike_z"])
def test_limits_below_zero_are_refused(field):
    with pytest.raises(ConfigError, match=f"--nonfinite.{field.replace('_', '-')} -1"):
        Nonfinite(**{field: -1})
