"""Faults of every kind, drawn from a seed: each run with faults ends with the same bits."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos_plan as plans
from trainer.resilience.fault_injection import PHASES

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("faults", "runs"), [
    (4, 1), pytest.param(40, len(plans.SHAPES), marks=pytest.mark.long)])
def test_runs_with_faults_of_every_kind_end_with_the_same_bits(faults: int, runs: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--faults", str(faults), "--seed", "1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip

    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    last = re.fullmatch(r"(\d+) of (\d+) faults, (\d+) of (\d+) runs: same bits",
                        ended.stdout.splitlines()[-1])
    assert last, output
    assert int(last[1]) == int(last[2]) >= faults
    assert int(last[3]) == int(last[4]) >= runs


def planned(faults: int, seed: int, *, soak: bool = False) -> list[plans.Run]:
    draw, left = random.Random(seed), list[plans.Card]()
    cards = plans.deck(draw, soak=soak)
    return [plans.plan(number, count, cards, left, draw, seed=seed)
            for number, count in enumerate(plans.sizes(faults))]


@pytest.mark.parametrize("seed", range(5))
def test_forty_faults_cover_every_phase_and_every_shape(seed: int) -> None:
    runs = planned(40, seed)

    faults = [fault for run in runs for fault in run.faults]
    assert {fault.phase for fault in faults} >= set(PHASES)
    assert {fault.kind for fault in faults} >= {*plans.AT_PHASES, *plans.ELSEWHERE}
    assert {(r.setting.ranks, r.setting.micro_batches) for r in runs} == set(plans.SHAPES)
    assert {run.setting.workers for run in runs} == {0, 2}
    assert any(f.rank == r.setting.ranks - 1 > 0 for r in runs for f in r.faults)
    assert any(f.rank == 0 for f in faults)
