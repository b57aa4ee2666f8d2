"""The benchmarks can be started: each imports and explains itself, and its arithmetic holds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from unread import ended

import benchmarks
from benchmarks import goodput_model as model
from benchmarks import reporting
from benchmarks.goodput import standing
from trainer.telemetry.std_streams import EXIT_PIPE

MODULES = sorted(module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
                 if not module.ispkg)
COSTS = model.Costs(step_s=1.0, interval_s=60.0, save_s=2.0, restart_s=30.0, survivors=False)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_a_docstring_and_a_command_explains_its_options(
        name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    _, command, end = Path(inspect.getfile(module)).read_text().partition(
        'if __name__ == "__main__":\n')
    if not command:
        return
    assert end == "    reporting.finish(main)\n"
    monkeypatch.setattr("sys.argv", ["benchmark", "--help"])

    with pytest.raises(SystemExit) as exit_info:
        module.main()

    assert exit_info.value.code == 0
    assert f"usage: python -m {name}" in capsys.readouterr().out


def test_a_benchmark_ends_quietly_if_its_reader_has_gone() -> None:
    text = ("from benchmarks import reporting\n"
            "reporting.finish(lambda: print('x' * 100_000, flush=True))")

    assert ended("-c", text) == (EXIT_PIPE, "")


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def measured() -> float:
        order.append("b")
        return float(len(order))

    found = reporting.in_turn({"a": lambda: order.append("a"), "b": measured}, 2)

    assert "".join(order) == "ababab"
    assert found["b"] == [4.0, 6.0]
    assert len(found["a"]) == 2
    assert reporting.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


@pytest.mark.parametrize("survivors", [True, False])
@pytest.mark.parametrize("mtbf_s", [300.0, 3000.0, 100_000.0])
def test_the_simulation_agrees_with_dalys_formula(survivors: bool, mtbf_s: float) -> None:
    costs = dataclasses.replace(COSTS, survivors=survivors)

    simulated = model.simulate(costs, mtbf_s, failures=20_000)

    assert simulated == pytest.approx(model.daly(costs, mtbf_s), rel=0.02)


def test_work_that_outlives_a_failure_is_whole_steps_or_whole_durable_intervals() -> None:
    survivors = dataclasses.replace(COSTS, survivors=True)
    slow = dataclasses.replace(COSTS, durable_s=10.0)

    assert model.kept(survivors, 62 + 3.5) == 60 + 3
    assert model.kept(survivors, 61) == 60  # during the save
    assert model.kept(COSTS, 62 + 3.5) == 60
    assert model.kept(COSTS, 61) == 0
    assert model.kept(slow, 69) == 0  # begun at 60, durable at 70
    assert model.kept(slow, 71) == 60


def test_time_that_two_deaths_share_counts_once() -> None:
    assert standing([10.0, 20.0, 20.5], [9.0, 11.0, 22.0]) == 1 + 2
    assert standing([10.0], []) == 0
