"""The benchmarks can be started: each module imports and explains itself."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks
from benchmarks import reporting

MODULES = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports_and_says_what_it_answers(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")

    assert module.__doc__


@pytest.mark.parametrize("name", ["checkpoint", "recovery"])
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
