"""docs/resume.md lists how each setting may change on resume."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.config.command_line import find_recipe, parse_config

DOC = Path(__file__).parents[3] / "docs/resume.md"


def test_the_documented_classes_are_those_of_the_configuration():
    config = parse_config([str(find_recipe("sample"))])
    documented = {
        match[1].replace(" ", "_"): {
            key.strip() for key in match[2].split(",") if "field" not in key}
        for match in re.finditer(r"^\| (fixed|must match|may change|ignored) \| (.*) \|$",
                                 DOC.read_text(), re.MULTILINE)
    }

    actual: dict[str, set[str]] = {}
    for name, _, change in config.leaves():
        if not name.startswith("task."):
            actual.setdefault(change, set()).add(name)

    assert documented == actual
