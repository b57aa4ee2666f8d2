"""The benchmarks can be started: each imports and explains itself, and its arithmetic holds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
from pathlib import Path

import pytest
from unread import ended

import benchmarks
from benchmarks import reporting
from benchmarks.goodput import EVERY, daly
from trainer.telemetry.std_streams import EXIT_PIPE

MODULES = sorted(module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
                 if not module.ispkg)


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


@pytest.mark.parametrize("steps", [1, EVERY])
@pytest.mark.parametrize("mtbf_s", [300.0, 3000.0, 100_000.0])
def test_the_forecast_agrees_with_a_simulation(steps: int, mtbf_s: float) -> None:
    draw, step_s, restart_s = random.Random(0), 2.0, 30.0
    alive = [draw.expovariate(1 / mtbf_s) for _ in range(20_000)]
    kept = [(seconds - restart_s) // (steps * step_s) * steps * step_s
            for seconds in alive if seconds > restart_s]

    assert sum(kept) / sum(alive) == pytest.approx(
        daly(mtbf_s, restart_s, step_s, steps=steps), rel=0.02)
