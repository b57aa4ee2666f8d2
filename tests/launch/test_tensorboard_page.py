"""A run that was killed three times, shown by TensorBoard: its server and its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures

STEPS, KILLS = 60, (15, 30, 45)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    faults = [f"--inject=kill:step={step}:rank=0:phase=backward" for step in KILLS]
    command = [sys.executable, "-m", "launch", "--nproc-per-node=1", "--max-restarts=9", "--",
               "--world.threads=1", f"--steps={STEPS}", "--log.tensorboard-every=1",
               "--checkpoint.every=20", "--eval.every=30", f"--run-dir={folder / pictures.RUN}",
               *faults]
    subprocess.run(command, check=True, cwd=pictures.ROOT, timeout=200)
    return folder


def request(address: str, what: str) -> Any:
    with urllib.request.urlopen(f"{address}/data/plugin/{what}", timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_server_has_each_step_once_and_the_page_its_tags(work):
    with pictures.tensorboard(work) as address:
        address = address.rstrip("/")
        [(run, tags)] = request(address, "scalars/tags").items()
        points = request(address, f"scalars/scalars?tag=train%2Floss&run={run}&format=json")
        assert {"train/loss", "train/accuracy", "optimizer/lr", "validation/loss"} <= set(tags)
        assert [step for _, step, _ in points] == list(range(1, STEPS + 1))
        if pictures.browser() is None:
            pytest.skip(f"no browser for the page: looked for {', '.join(pictures.BROWSERS)}")
        page = pictures.draw(f"{address}/?tagFilter=%5Etrain%2F#timeseries", 1200, 2000,
                              "--dump-dom", "--virtual-time-budget=20000")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    shown = text[text.index("Tags matching filter"):]
    assert "train /loss" in shown, shown[:2000]
    assert "train /accuracy" in shown
