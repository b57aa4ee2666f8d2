"""The tables of the documentation name everything that can be given: faults, members of a task."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.resilience import fault_injection
from trainer.task import METHOD_ARGUMENTS, Task

DOCS = Path(__file__).parents[3] / "docs"


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


def test_each_kind_and_phase_of_a_fault_is_described():
    page = (DOCS / "schedulers.md").read_text()
    kinds = re.search(r"\| KIND \|.*?\n\n", page, re.DOTALL)
    phases = re.search(r"^P is .*?\.$", page, re.DOTALL | re.MULTILINE)
    assert kinds
    assert phases

    first = " ".join(row.split("|")[1] for row in kinds[0].splitlines()[2:] if row)
    assert codes(first) == set(fault_injection.KINDS)
    assert codes(phases[0]) == set(fault_injection.PHASES)


def test_each_member_of_a_task_is_described():
    page = (DOCS / "your-own-task.md").read_text()
    table = re.search(r"\| member \|.*?\n\n", page, re.DOTALL)
    assert table
    assert Task.__doc__

    named = {re.split(r"\W", code)[0] for row in table[0].splitlines()[2:] if row
             for code in codes(row.split("|")[1])}
    optional = set(re.findall(r"^    - `(\w+)", Task.__doc__, re.MULTILINE))
    assert named == set(METHOD_ARGUMENTS) | optional | {"preview"}
