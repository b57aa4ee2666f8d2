"""docs/your-own-task.md: the first example works as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import ConfigError

PAGE = (Path(__file__).parents[3] / "docs/your-own-task.md").read_text()


def test_the_first_example_runs_again_and_only_with_a_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    seed = next(line for line in cell.splitlines() if "manual_seed" in line)

    def run(text: str) -> torch.nn.Module:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(text, names)
        return names["done"].model

    first, again = run(cell), run(cell)

    assert torch.equal(first.weight, again.weight)
    torch.seed()
    with pytest.raises(ConfigError, match="random numbers drawn before the run"):
        run(cell.replace(seed, ""))
