"""The documentation names all kinds of faults and members of a task, and flags that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from trainer.config.command_line import parse_config
from trainer.resilience import fault_injection
from trainer.task import METHOD_ARGUMENTS, Task

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", text))


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))],
                         ids=lambda page: page.stem)
def test_each_flag_exists_and_takes_the_values_that_are_given_for_it(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    known = {"--" + name.replace("_", "-") for name, *_ in parse_config(["sample"]).leaves()}

    assert set(re.findall(r"--(?!task\.)[a-z]+\.[a-z0-9-]+\b", page.read_text())) <= known
    for code in codes(text):
        placeholder = re.search(r"\b[A-Z]+\b|\|", code)
        if re.match(r"--(?!task\.)[a-z]+\.[a-z0-9-]+[ =]", code) and not placeholder:
            parse_config(["sample", *shlex.split(code)])


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
