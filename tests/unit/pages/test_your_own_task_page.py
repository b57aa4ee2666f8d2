"""docs/your-own-task.md: the examples work as the page says."""

from __future__ import annotations

import json
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


def test_the_example_with_metrics_of_torchmetrics_runs(tmp_path, monkeypatch):
    pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)
    section = PAGE.partition("## Metrics that are no means")[2]

    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], {"__name__": "__main__"})

    line = json.loads(Path("runs/detect/metrics.jsonl").read_text().splitlines()[-1])
    assert {"val_loss", "val_auroc", "val_clean_auroc", "val_noisy_ap"} <= {*line}
    assert line["val_auroc"] == line["val_clean_auroc"] > line["val_noisy_auroc"] > 0.5
