"""Faults of every kind, drawn from a seed: each run with faults ends with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos_plan as plans

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("options", "faults", "runs"), [
    ([], 4, 1), pytest.param([], 40, len(plans.SHAPES), marks=pytest.mark.long),
    pytest.param(["--launcher=torchrun"], 7, 1, marks=pytest.mark.long),
    pytest.param(["--mirror"], 3, 1, marks=pytest.mark.long)],
    ids=["few", "many", "torchrun", "mirror"])
def test_runs_with_faults_of_every_kind_end_with_the_same_bits(options, faults, runs):
    if "--mirror" in options:
        pytest.importorskip("moto.server", reason="moto[server] is not installed")
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--faults", str(faults), "--seed", "1",
         *options], cwd=ROOT, capture_output=True, text=True, check=False)

    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    last = re.fullmatch(r"(\d+) of (\d+) faults, (\d+) of (\d+) runs: same bits",
                        ended.stdout.splitlines()[-1])
    assert last, output
    assert int(last[1]) == int(last[2]) >= faults
    assert int(last[3]) == int(last[4]) >= runs
