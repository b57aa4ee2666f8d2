"""docs/from-other-trainers.md: their arguments exist, and our flags can be parsed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from trainer.__main__ import DRY_RUN
from trainer.config.command_line import parse_config

PAGE = (Path(__file__).parents[3] / "docs/from-other-trainers.md").read_text()
CLASSES = {"Trainer": "pytorch_lightning", "Accelerator": "accelerate",
           "TrainingArguments": "transformers"}


def rows(name: str) -> list[tuple[str, str]]:
    """The rows of the table of a class: theirs and ours."""
    table = PAGE.partition(f"| `{name}(…)` | flags |\n|---|---|\n")[2].partition("\n\n")[0]
    return [(row.split(" | ")[0].strip("| "), row.split(" | ")[1].strip("| "))
            for row in table.splitlines()]


@pytest.mark.parametrize("name", CLASSES)
def test_each_argument_is_one_of_the_class(name):
    module = pytest.importorskip(CLASSES[name])
    known = inspect.signature(getattr(importlib.import_module(module.__name__), name)).parameters

    for theirs, _ in rows(name):
        for code in re.findall(r"`(.*?)`", theirs):
            call = ast.parse(f"f({code})", mode="eval").body
            assert isinstance(call, ast.Call)
            assert {argument.arg for argument in call.keywords} <= known.keys(), code


@pytest.mark.parametrize("name", CLASSES)
def test_each_flag_can_be_parsed(name):
    found = rows(name)
    assert len(found) > 6
    for theirs, ours in found:
        flags = [code for code in re.findall(r"`(.*?)`", ours) if code.startswith("--")]
        assert flags or "`" in ours or "same command" in ours, theirs
        for code in flags:
            if code != DRY_RUN:
                parse_config(shlex.split(code))
