"""The benchmarks can be started: each imports and explains itself, and its arithmetic holds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import random
from pathlib import Path

import pytest
import torch
from torch import nn
from unread import ended

import benchmarks
from benchmarks import claims, gpu_models, gpu_saves, memory, reporting, scaling, turns
from benchmarks import goodput_model as model
from benchmarks.goodput import kill_times, standing
from trainer.checkpoint.snapshot import Snapshot
from trainer.telemetry.std_streams import EXIT_PIPE

MODULES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
COSTS = model.Costs(step_s=1.0, interval_s=60.0, save_s=2.0, restart_s=30.0, survivors=False)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports_and_says_what_it_answers(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    assert module.__doc__


def test_nothing_is_said_of_a_reader_that_has_gone() -> None:
    text = ("from benchmarks import reporting\n"
            "reporting.finish(lambda: print('x' * 100_000, flush=True))")

    assert ended("-c", text) == (EXIT_PIPE, "")


@pytest.mark.parametrize("name", MODULES)
def test_a_command_ends_by_reporting_or_is_a_rank_of_another(name: str) -> None:
    text = Path(inspect.getfile(importlib.import_module(f"benchmarks.{name}"))).read_text()
    _, command, end = text.partition('if __name__ == "__main__":\n')

    assert not command or name in ("peers", "lightning_peer") or (
        end == "    reporting.finish(main)\n")


@pytest.mark.parametrize("name", [
    "checkpoint", "claims", "compile", "goodput", "gpu", "loader", "memory", "recovery", "scaling",
])  # fmt: skip
def test_a_benchmark_explains_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr("sys.argv", ["benchmark", "--help"])

    with pytest.raises(SystemExit) as end:
        module.main()

    assert end.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


def test_a_summary_tells_median_and_quartiles() -> None:
    found = reporting.summary([1.0, 2.0, 3.0, 4.0, 5.0])

    assert (found["n"], found["median"], found["min"], found["max"]) == (5, 3.0, 1.0, 5.0)
    assert (found["q1"], found["q3"]) == (1.5, 4.5)
    assert reporting.summary([2.0])["q1"] == 2.0


def test_a_table_is_aligned() -> None:
    lines = reporting.table(["", "ms"], [["a", "1"], ["long name", "1,000"]]).splitlines()

    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("-: |")


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def measured() -> float:
        order.append("b")
        return float(len(order))

    found = turns.in_turn({"a": lambda: order.append("a"), "b": measured}, 2)

    assert "".join(order) == "ababab"
    assert found["b"] == [4.0, 6.0]
    assert len(found["a"]) == 2
    assert turns.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_slope_is_that_of_least_squares() -> None:
    assert turns.slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert turns.slope([0, 1, 2], [0, 3, 0]) == pytest.approx(0)
    with pytest.raises(ValueError, match="two places"):
        turns.slope([1], [1])


def test_growth_is_that_of_the_last_half() -> None:
    rising = [(step, 100.0 + min(step, 500)) for step in range(0, 1000, 10)]
    leaking = [(step, 100.0 + 0.004 * step) for step in range(0, 1000, 10)]

    assert memory.growth(rising)["mb_per_1000_steps"] == pytest.approx(0)
    assert memory.growth(rising)["first_mb"] == 100
    assert memory.growth(leaking)["mb_per_1000_steps"] == pytest.approx(4)
    assert memory.resident_bytes() > 1e6


@pytest.mark.parametrize("survivors", [True, False])
@pytest.mark.parametrize("mtbf_s", [300.0, 3000.0, 100_000.0])
def test_the_simulation_agrees_with_dalys_formula(survivors: bool, mtbf_s: float) -> None:
    costs = dataclasses.replace(COSTS, survivors=survivors)

    simulated = model.simulate(costs, mtbf_s, failures=20_000)

    assert simulated == pytest.approx(model.daly(costs, mtbf_s), rel=0.02)


def test_youngs_interval_costs_least_where_failures_are_rare() -> None:
    mtbf_s = 100_000.0
    best = model.young(COSTS.save_s, mtbf_s)

    def goodput(interval_s: float) -> float:
        return model.daly(dataclasses.replace(COSTS, interval_s=interval_s), mtbf_s)

    assert best == math.sqrt(2 * 2 * 100_000)
    assert goodput(best) > max(goodput(best / 1.5), goodput(best * 1.5))
    # To first order: restarts, and twice what the saves cost.
    assert 1 - goodput(best) == pytest.approx(30 / mtbf_s + 2 * 2 / best, rel=0.05)


def test_work_that_outlives_a_failure_is_whole_steps_or_whole_durable_intervals() -> None:
    survivors = dataclasses.replace(COSTS, survivors=True)
    slow = dataclasses.replace(COSTS, durable_s=10.0)

    assert model.kept(survivors, 62 + 3.5) == 60 + 3
    assert model.kept(survivors, 61) == 60  # amid the save
    assert model.kept(COSTS, 62 + 3.5) == 60
    assert model.kept(COSTS, 61) == 0
    assert model.kept(slow, 69) == 0  # begun at 60, durable at 70
    assert model.kept(slow, 71) == 60


def test_published_failure_rates_give_the_published_mean_times() -> None:
    hours = {gpus: model.mtbf_s(gpus, failures_per_1000_node_days=6.5) / 3600
             for gpus in (16384, 131072)}

    assert hours[16384] == pytest.approx(1.8, rel=0.01)
    assert hours[131072] == pytest.approx(0.23, rel=0.03)


def test_as_many_ranks_are_killed_as_are_expected_in_the_time() -> None:
    times = kill_times(6.0, 12, seed=3)

    assert len(times) == 12
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 72


def test_a_difference_needs_its_quartiles_on_one_side() -> None:
    assert claims.verdict({"q1": 1.01, "q3": 1.2}) == "faster"
    assert claims.verdict({"q1": 0.9, "q3": 1.2}) == "no difference"
    assert claims.verdict({"q1": 0.8, "q3": 0.9}) == "slower"
    assert claims.verdict(None) == "not measured"


def test_what_a_forward_keeps_is_counted_once_and_without_parameters() -> None:
    linear, inputs = nn.Linear(8, 4), torch.randn(16, 8)

    def run() -> None:
        out = linear(inputs)
        (out * out).sum()  # keeps `out` twice, one storage

    assert claims.kept_bytes(linear, run) == 16 * 8 * 4 + 16 * 4 * 4
    with torch.no_grad():
        assert claims.kept_bytes(linear, run) == 0


def test_the_slowest_rank_decides_a_block() -> None:
    ranks = [{"trainer": [2.0, 4.0], "bare DDP": [1.0, 4.0], "independent": [1.0, 2.0]},
             {"trainer": [1.0, 5.0], "bare DDP": [3.0, 4.0], "independent": [1.0, 1.0]}]

    found = scaling.summarise(ranks, global_size=8)

    assert found["ours_over_ddp"]["max"] == 1.5
    assert found["ours_over_ddp"]["min"] == 0.8
    assert found["ours_over_ddp_total"] == 1.0
    assert found["samples_per_s"]["trainer"]["max"] == scaling.BLOCK * 8 / 2


def test_levers_add_up() -> None:
    images, text = gpu_models.levers(images=True), gpu_models.levers(images=False)

    assert images[0] == gpu_models.Lever(name="fp32")
    assert images[-1] == gpu_models.Lever(name="prefetch", tf32=True, bf16=True, fused=True,
                                          channels_last=True, compile="reduce-overhead",
                                          prefetch=True)
    assert not any(lever.channels_last for lever in text)


def test_a_tiny_gpt_is_trained_and_its_work_counted() -> None:
    device, subject = torch.device("cpu"), gpu_models.subjects(tiny=True)[-1]

    trainee = gpu_models.Trainee(subject, gpu_models.levers(images=False)[0], device)
    trainee.step()
    live = gpu_saves.state_of(trainee.model, trainee.optimizer)

    # Attention aside: 6 operations a weight and token, of the blocks and of the output.
    weights = 2 * 12 * 32 * 32 + 64 * 32
    assert gpu_models.count_flops(trainee) >= 6 * weights * 2 * 16
    assert gpu_models.count_traffic(trainee) > 0
    assert len(live["optimizer"]) == 3 * len(list(trainee.model.parameters()))
    copy = Snapshot().take(live)
    assert all(torch.equal(copy[f][n], t) for f in live for n, t in live[f].items())


def test_bytes_moved_are_those_read_and_written() -> None:
    a = torch.ones(10)

    with gpu_models.Traffic() as traffic:
        (a + a).view(2, 5).add_(1)
        torch.empty(1000)

    # a twice, the sum once; then read and written in place; a view and an allocation move nothing.
    assert traffic.bytes == 3 * 40 + 2 * 40


def test_kills_are_spread_over_the_whole_time() -> None:
    draw = random.Random(0)
    middles = [kill_times(1.0, 2, draw.randrange(1 << 30))[0] for _ in range(2000)]

    assert sum(middles) / len(middles) == pytest.approx(2 / 3, rel=0.05)


def test_time_that_two_deaths_share_counts_once() -> None:
    assert standing([10.0, 20.0, 20.5], [9.0, 11.0, 22.0]) == 1 + 2
    assert standing([10.0], []) == 0
