"""The lab's page and its benchmark are of the same commands, and its figures of the right steps."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from benchmarks.lessons import lab
from trainer.config.command_line import parse_config

PAGE = (Path(__file__).parents[3] / "docs/lab.md").read_text()
NAMES = [recipe.name for recipe in lab.RECIPES]


def command(name: str) -> list[str]:
    return lab.command_of(name, epochs=4, ranks=2, folder=Path("runs/lab"), clip=2.0)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_on_the_page_and_can_be_parsed(name):
    found = command(name)

    assert f"```bash\npython {shlex.join(found)}\n```" in PAGE
    parse_config(found[found.index("--") + 1 :])


def test_the_table_on_the_page_has_a_row_for_each_step():
    head, _, *rows = [line for line in PAGE.splitlines() if line.startswith("|")][-len(NAMES) - 2:]

    assert head.startswith("| step | test | validation |")
    assert [row.split("|")[1].strip() for row in rows] == NAMES
