"""Each schedule compared with plain torch, also with a stop at every step; the warm-up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from trainer.checkpoint.progress import RateCycles, ScheduleLengths
from trainer.config.fields import Duration
from trainer.config.schema import Schedule
from trainer.errors import ConfigError
from trainer.optim import schedules

TOTAL, EPOCH, PEAKS = 40, 8, (1.0, 0.25)
Rates = list[list[float]]


def optimizer_of(name: str = "sgd") -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": peak} for peak in PEAKS]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.99))
    return torch.optim.SGD(groups, lr=1.0, momentum=0.7)


def sawtooth(update: int) -> float:
    return 1 - update % 7 / 7


def figure(update: int) -> float:
    """Metric for plateau: a loss that falls, then stays constant."""
    return max(1.0, 2.0 - update / 10)


def seen(optimizer: torch.optim.Optimizer) -> list[float]:
    return [v for g in optimizer.param_groups
            for v in (g["lr"], *g.get("betas", ()), g.get("momentum", 0.0))]


def ours(config: Schedule, *, optim: str = "sgd", stop: bool = False, steps: int = TOTAL,
         after: Schedule | None = None, at: int = 0) -> Rates:
    """Rates of each update.

    Args:
        stop: save, and continue with new objects, at every step.
        after: the configuration from update `at` on.
    """
    optimizer, horizon = optimizer_of(optim), ScheduleLengths(epoch=EPOCH, total=TOTAL)
    schedule, rates = schedules.Scheduler(config, optimizer, horizon), []
    for update in range(steps):
        rates.append(seen(optimizer))
        optimizer.step()
        schedule.step()
        if update % 2:
            schedule.validated({"val_loss": figure(update), "val_accuracy": -figure(update)})
        if stop or (after and update + 1 == at):
            saved = json.loads(json.dumps([schedule.state_dict(), [
                {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]]))
            # The run may have become longer: its lengths are restored first.
            optimizer, horizon = optimizer_of(optim), ScheduleLengths(epoch=EPOCH, total=2 * TOTAL)
            schedule = schedules.Scheduler(after or config, optimizer, horizon)
            horizon.load_state_dict({"epoch": EPOCH, "total": TOTAL})
            schedule.load_state_dict(*saved)
    return rates


def torchs(make: Callable[[torch.optim.Optimizer], Any], *, optim: str = "sgd",
           warmup: int = 1, steps: int = TOTAL) -> Rates:
    """The same with torch alone; a warm-up uses SequentialLR."""
    optimizer, rates = optimizer_of(optim), []
    schedule = make(optimizer)
    if warmup > 1:
        rise = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)
        schedule = lr_scheduler.SequentialLR(optimizer, [rise, schedule], [warmup - 1])
    for _ in range(steps):
        rates.append(seen(optimizer))
        optimizer.step()
        schedule.step()
    return rates


CASES = {
    "cosine-annealing": ((), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL - 1)),
    "cosine-annealing ": (("T_max=1ep", "eta_min=0.1"),
                          lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCH, 0.1)),
    "warm-restarts": ((), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, EPOCH)),
    "warm-restarts ": (("T_0=5", "T_mult=2", "eta_min=0.01"),
                       lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2, 0.01)),
    "linear": ((), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, TOTAL - 1)),
    "linear ": (("start_factor=0.5", "end_factor=0", "total_iters=50%"),
                lambda o: lr_scheduler.LinearLR(o, 0.5, 0.0, 20)),
    "multi-step": (("milestones=2ep,30", "gamma=0.5"),
                   lambda o: lr_scheduler.MultiStepLR(o, [16, 30], 0.5)),
    "one-cycle": ((), lambda o: lr_scheduler.OneCycleLR(o, list(PEAKS), TOTAL)),
    "one-cycle ": (("max_lr=2", "pct_start=0.4", "div_factor=10", "final_div_factor=100",
                    "anneal_strategy=linear", "three_phase=true", "base_momentum=0.8",
                    "max_momentum=0.9"),
                   lambda o: lr_scheduler.OneCycleLR(
                       o, 2.0, TOTAL, pct_start=0.4, div_factor=10, final_div_factor=100,
                       anneal_strategy="linear", three_phase=True, base_momentum=0.8,
                       max_momentum=0.9))}


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_without_a_warm_up_a_schedule_has_the_bits_of_torchs(case, optim):
    options, make = CASES[case]
    config = Schedule(name=case.strip(), warmup=Duration(0), options=options)

    assert ours(config, optim=optim) == torchs(make, optim=optim)


@pytest.mark.parametrize(("warmup", "updates"), [
    (Duration(0), 0), (Duration(7), 7), (Duration(0.5, "epochs"), 4), (Duration(2, "epochs"), 16),
    (Duration(5, "percent"), 2), (Duration(0.1, "percent"), 1), (Duration(100), TOTAL)])
@pytest.mark.parametrize(("name", "end"), [("cosine", 0.1), ("constant", 1.0)])
def test_the_warm_up_rises_in_equal_steps_to_the_peak(name, end, warmup, updates):
    config = Schedule(name=name, warmup=warmup)

    rates = [lr for lr, *_ in ours(config)]

    assert rates[:updates] == pytest.approx([(n + 1) / updates for n in range(updates)])
    assert rates[updates:] == sorted(rates[updates:], reverse=True)
    assert 0 < min(rates) <= max(rates) <= 1
    assert rates[-1] == pytest.approx(1.0 if updates == TOTAL else end)


@pytest.mark.parametrize(("name", "options", "make"), [
    ("cosine", (), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL - 5)),
    ("cosine-annealing", (), lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL - 5)),
    ("constant", (), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ("linear", (), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, TOTAL - 5)),
    ("warm-restarts", ("T_0=6",), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6)),
    ("multi-step", ("milestones=16,30",), lambda o: lr_scheduler.MultiStepLR(o, [12, 26])),
    ("one-cycle", (), lambda o: lr_scheduler.OneCycleLR(o, list(PEAKS), TOTAL - 4))])
def test_with_a_warm_up_a_schedule_equals_torchs_sequential(name, options, make):
    least = {"min_ratio": 0.0} if name in ("cosine", "linear") else {}
    config = Schedule(name=name, warmup=Duration(5), options=options, **least)

    found, expected = ours(config), torchs(make, warmup=5)

    assert [lr for lr, *_ in found] == pytest.approx([lr for lr, *_ in expected], abs=1e-12)


@pytest.mark.parametrize(("config", "ends"), [
    (Schedule(name="warm-restarts", options=("T_0=5", "T_mult=2"), warmup=Duration(0)),
     [5, 15, 35]),
    (Schedule(name="warm-restarts", options=("T_0=5", "T_mult=2"), warmup=Duration(4)),
     [8, 18, 38]),
    (Schedule(name="test_schedules:sawtooth", warmup=Duration(9)), [14, 21, 28, 35]),
    (Schedule(name="cosine-annealing", options=("T_max=10",), warmup=Duration(0)), [11, 31]),
    (Schedule(name="one-cycle", warmup=Duration(0)), []), (Schedule(), []),
])  # fmt: skip
def test_a_cycle_ends_where_the_rate_rises_after_it_has_fallen(config, ends):
    cycles, rates = RateCycles(), [lr for lr, *_ in ours(config, steps=TOTAL + 1)]

    for step, pair in enumerate(itertools.pairwise(rates), 1):
        cycles.load_state_dict(json.loads(json.dumps(cycles.state_dict())))
        cycles.note(step, *pair)

    assert cycles.ends == ends


@pytest.mark.parametrize(("options", "more"), [
    (("patience=2", "factor=0.5"), {"patience": 2, "factor": 0.5}),
    (("patience=1", "cooldown=2", "threshold=0.01", "threshold_mode=abs", "min_lr=0.01",
      "metric=val_accuracy:max"),
     {"patience": 1, "cooldown": 2, "threshold": 0.01, "threshold_mode": "abs", "min_lr": 0.01,
      "mode": "max"})])
@pytest.mark.parametrize("warmup", [0, 6])
def test_a_plateau_equals_torchs_with_and_without_a_warm_up(options, more, warmup):
    config = Schedule(name="plateau", warmup=Duration(warmup), options=options)
    optimizer, expected = optimizer_of(), []
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, **{"mode": "min", **more})
    for update in range(TOTAL):
        rates = seen(optimizer)
        rise = min(1.0, (update + 1) / warmup) if warmup else 1.0
        expected.append([v * rise if i % 2 == 0 else v for i, v in enumerate(rates)])
        if update % 2 and update + 1 >= warmup - 1:
            sign = -1 if more.get("mode") == "max" else 1
            plateau.step(sign * figure(update))

    found = ours(config)

    assert [lr for lr, *_ in found] == pytest.approx([lr for lr, *_ in expected], abs=1e-12)
    assert found[-1][0] < 0.3 * max(lr for lr, *_ in found)


def halving(update: int) -> float:
    return 0.5 ** (update // 10)


ALL = [(case, options) for case, (options, _) in CASES.items()] + [
    ("cosine", ()), ("constant", ()), ("plateau", ("patience=1", "factor=0.3")),
    (f"{__name__}:halving", ())]


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("case", "options"), ALL)
@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_a_stop_at_every_step_changes_no_rate(case, options, optim, warmup):
    config = Schedule(name=case.strip(), warmup=Duration(warmup), options=options)

    straight = ours(config, optim=optim, steps=TOTAL + 5)

    assert ours(config, optim=optim, steps=TOTAL + 5, stop=True) == straight


@pytest.mark.parametrize("name", ["cosine", "cosine-annealing", "one-cycle", "linear"])
def test_a_longer_run_continues_at_the_last_rate(name):
    rates = ours(Schedule(name=name, warmup=Duration(3)), steps=TOTAL + 10)

    assert rates[TOTAL - 1:] == [rates[TOTAL - 1]] * 11
    assert rates[TOTAL - 1][0] < rates[TOTAL - 2][0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_changed_schedule_takes_effect_from_there(name):
    before, after = Schedule(), Schedule(name=name, warmup=Duration(0), min_ratio=0.5)

    changed = ours(before, after=after, at=20)

    assert changed[:20] == ours(before)[:20]
    assert changed[20:] == ours(after)[20:]


def test_a_plateau_with_a_changed_factor_keeps_its_state_and_rate():
    before = Schedule(name="plateau", warmup=Duration(0), options=("patience=1", "factor=0.5"))
    after = Schedule(name="plateau", warmup=Duration(0), options=("patience=1", "factor=0.1"))
    straight = [lr for lr, *_ in ours(before)]
    at = straight.index(0.25) + 1

    changed = [lr for lr, *_ in ours(before, after=after, at=at)]

    assert changed[: at + 1] == straight[: at + 1]
    assert changed[straight.index(0.125)] == pytest.approx(0.025)


def test_a_function_maps_the_number_of_the_update_to_a_factor_of_the_peak():
    config = Schedule(name=f"{__name__}:halving", warmup=Duration(4))

    rates = [lr for lr, *_ in ours(config)]

    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == [halving(n) for n in range(4, TOTAL)]


def undefined(update: int) -> float:
    return float("nan")


def negative(update: int) -> float:
    return -1.0


@pytest.mark.parametrize(("name", "options", "message"), [
    ("warm-restarts", ("T_mul=3",), "unexpected keyword argument 'T_mul'"),
    ("warm-restarts", ("T_0=three",), "is not a length"),
    ("warm-restarts", ("T_mult=1.5",), "'1.5'"),
    ("one-cycle", ("pct_start=3",), "pct_start"),
    ("multi-step", (), "milestones=30ep,60ep"),
    ("plateau", ("metric=loss",), "val_loss:min"),
    ("plateau", ("mode=max",), "multiple values for argument 'mode'"),
    ("math:nothing", (), "has no 'nothing'"),
    ("math:pi", (), "it raised TypeError"),
    (f"{__name__}:undefined", (), "it returned nan"),
    (f"{__name__}:negative", (), "it returned -1.0; it must return a factor of --optim.lr, 0 or "
                                 "more")])
def test_invalid_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match="--schedule") as error:
        ours(Schedule(name=name, options=options, warmup=Duration(0)))

    assert message in str(error.value)
