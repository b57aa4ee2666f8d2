"""On one CUDA card: a stopped run ends with the bits of a straight one; devices are timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.commands.compare import differences
from trainer.step import Marks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]


def train(run: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "trainer", "--device=cuda", "--steps=30", f"--run={run}",
               "--eval.every=10", "--task.dropout=0.2", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode


@pytest.mark.parametrize("arguments", [
    ["--precision.compile=off"], ["--precision.dtype=fp32", "--precision.compile=off"],
    ["--precision.dtype=fp16", "--precision.compile=off"], ["--precision.compile=on"],
])  # fmt: skip
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, arguments):
    stop = "--inject=term:step=13"

    assert train(tmp_path / "straight", *arguments) == 0
    assert train(tmp_path / "stopped", *arguments, stop) == 75
    assert train(tmp_path / "stopped", *arguments, stop) == 0

    assert not list(differences(tmp_path / "straight", tmp_path / "stopped"))


def test_the_time_between_two_marks_is_the_devices_own():
    marks = Marks(on_cuda=True)
    matrix = torch.randn(4096, 4096, device="cuda")

    marks.first()
    for _ in range(10):
        matrix = matrix @ matrix
    marks.second()
    torch.cuda.synchronize()

    seconds = marks.between_s()
    assert seconds is not None
    assert seconds > 0


def test_a_survivor_copies_the_boundary_beside_a_kernel_that_is_stuck():
    from benchmarks.gpu_saves import beside_a_stuck_kernel

    live = {"model": {"weight": torch.randn(4096, 4096, device="cuda"),
                      "count": torch.tensor(7, device="cuda")}}

    found = beside_a_stuck_kernel(live)

    assert found["kernel_still_ran"]
    assert found["same_bits"]
