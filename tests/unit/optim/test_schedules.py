"""Learning rate over the updates: start, end, units."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.progress import ScheduleLengths
from trainer.config.fields import Duration
from trainer.config.schema import Schedule
from trainer.optim import schedules


def rates(total: int, *, epoch: int = 10, more: int = 0, **fields: object) -> list[float]:
    config = Schedule(**fields)
    return [schedules.factor(config, update, epoch=epoch, total=total)
            for update in range(total + more)]


lengths = st.one_of(
    st.integers(0, 300).map(lambda n: Duration(n)),
    st.floats(0, 30).map(lambda n: Duration(n, "epochs")),
    st.floats(0, 100).map(lambda n: Duration(n, "percent")),
)


def test_the_warm_up_rises_in_equal_steps_from_above_zero_to_the_peak():
    found = rates(20, warmup=Duration(5))

    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(found) == found[4] == 1.0


def test_the_cosine_falls_from_the_peak_to_its_minimum_at_the_last_update():
    found = rates(20, warmup=Duration(5), min_ratio=0.1)

    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[-1] == pytest.approx(0.1, abs=1e-12)
    assert found[-2] > 0.1
    middle = 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2
    assert found[9] == pytest.approx(middle)



def test_without_a_warm_up_the_first_update_is_on_the_curve():
    found = rates(10, warmup=Duration(0))

    assert 0.9 < found[0] < 1.0
    assert rates(10, warmup=Duration(0), name="constant")[0] == 1.0


@pytest.mark.parametrize(("warmup", "updates"), [
    (Duration(7), 7), (Duration(0.5, "epochs"), 5), (Duration(2, "epochs"), 20),
    (Duration(5, "percent"), 2), (Duration(0.1, "percent"), 1),
])
def test_the_warm_up_is_given_in_steps_epochs_or_percent(warmup, updates):
    found = rates(40, warmup=warmup)

    assert found[:updates] == pytest.approx([(n + 1) / updates for n in range(updates)])
    assert found[updates] < 1


def test_a_warm_up_longer_than_the_run_reaches_the_peak_with_the_last_update():
    assert rates(4, warmup=Duration(100)) == [0.25, 0.5, 0.75, 1.0]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 50), lengths, st.floats(0, 1),
       st.sampled_from(["cosine", "constant"]))
def test_all_rates_are_between_zero_and_the_peak(
    total, epoch, warmup, least, name
):
    least = least if name == "cosine" else Schedule().min_ratio  # others ignore it
    found = rates(total, epoch=epoch, more=3, warmup=warmup, min_ratio=least, name=name)

    assert found[0] > 0 or (total == 1 and least == 0)
    assert all(0 <= rate <= 1 for rate in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_the_scheduler_sets_the_rate_of_each_update_and_group():
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 2.0}, {"params": [second], "lr": 0.5}])
    config = Schedule(warmup=Duration(3))
    schedule = schedules.Scheduler(config, optimizer, ScheduleLengths(epoch=5, total=10))

    seen = []
    for _ in range(10):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()

    expected = [schedules.factor(config, n, epoch=5, total=10) for n in range(10)]
    assert [one for one, _ in seen] == pytest.approx([2.0 * rate for rate in expected])
    assert [other for _, other in seen] == pytest.approx([0.5 * rate for rate in expected])
