"""docs/the-loop.md quotes the code: lines, flags, names, and what was measured."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.lessons import wrong_orders
from trainer.config.command_line import parse_config
from trainer.config.schema import SCHEDULES
from trainer.tasks.losses import LOSSES

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / f"docs/{name}.md" for name in ("the-loop", "lab")]
PAGE = PAGES[0].read_text()


def tables(text: str = PAGE) -> Iterator[list[list[str]]]:
    """The cells of each table, the head first."""
    for found in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                 for line in found.splitlines()]
        yield [lines[0], *lines[2:]]


def table(first: str) -> list[list[str]]:
    """The rows below the head whose first cell begins so."""
    (found,) = [rows for rows in tables() if rows[0][0].startswith(first)]
    return found[1:]


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_each_quoted_line_is_in_its_file():
    checked = 0
    for head, *rows in tables():
        for column, name in enumerate(head):
            if not name.endswith(".py`"):
                continue
            text = (ROOT / name.strip("`")).read_text()
            lines = {line.strip() for line in re.sub(r"  # .*", "", text).splitlines()}
            for row in rows:
                for code in codes(row[column]):
                    assert code in lines, f"{name}: {code}"
                    checked += 1
    assert checked > 40


def test_each_row_of_the_table_holds():
    threads = torch.get_num_threads()
    with warnings.catch_warnings(action="error"):
        measured = wrong_orders.measure(list(wrong_orders.rows()))
    torch.set_num_threads(threads)

    assert [row["name"] for row in measured if not row["holds"]] == []
    assert set(wrong_orders.rows()) == set(wrong_orders.MISTAKES)


def test_each_flag_on_the_pages_is_one_of_the_configuration():
    known = {"--" + name.replace("_", "-") for name, *_ in parse_config(["sample"]).leaves()}
    known |= {"--run-dir", "--rows", "--markdown", "--json", "--nproc-per-node", "--max-restarts"}

    for page in PAGES:
        told = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", page.read_text()))
        assert told - known == set(), page.name


def test_the_tables_to_choose_from_know_all_schedules_and_losses():
    chosen = {code for *_, flags in table("you know") for text in codes(flags)
              for code in re.findall(r"--schedule\.name ([\w-]+)", text)}

    assert chosen <= set(SCHEDULES)
    assert {code for row in table("what is predicted") for code in codes(row[-1])} == set(LOSSES)


def test_anchors_are_unique_and_links_lead_somewhere():
    anchors = re.findall(r'<a id="([\w-]+)">', PAGE)

    assert len(set(anchors)) == len(anchors) > 10
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", page.read_text()):
            assert not path or (page.parent / path).exists(), path
            assert not anchor or anchor in anchors, anchor
