"""`lr-find` and `profile`: what they print and write, and that a run stays unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs import run

from trainer.__main__ import main
from trainer.commands.lr_find import suggest

RATES = [10 ** (-5 + i / 20) for i in range(100)]


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_loss():
    losses = [2.3 if r < 1e-3 else 2.3 - 0.9 * min(1.0, (r - 1e-3) / 0.02) for r in RATES]
    losses = [loss if r < 0.1 else loss + 5 * (r - 0.1) for r, loss in zip(RATES, losses,
              strict=True)]  # fmt: skip

    found = suggest(RATES, losses)

    assert found.rate == pytest.approx(found.lowest / 10)
    assert 0.05 < found.lowest < 0.3
    assert 1e-3 < found.steepest < 0.05


def test_a_loss_that_never_falls_gives_no_suggestion():
    assert suggest(RATES, [2.3 + 0.001 * (i % 2) for i in range(100)]).rate == 0
    assert suggest(RATES, [2.3 + 0.01 * i for i in range(100)]).rate == 0


def within(folder: str, *arguments: str) -> int:
    """In a rank: run a command in a folder; it leaves no file of its temporary run open."""
    os.chdir(folder)
    code = main([*arguments, "--task.points=300", "--world.threads=1", "--device=cpu"])
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [name for name in opened if "/trainer-" in name]
    return code


def test_lr_find_prints_a_table_and_a_suggestion_and_leaves_the_run_unchanged(
    ranks, tmp_path, capfd
):
    folder = run(ranks, 1, tmp_path / "run", "spiral", "--task.points=300", "--device=cpu",
                 "--steps=5", "--eval.every=off")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    capfd.readouterr()

    assert ranks(1, within, str(tmp_path), "lr-find", "spiral", "--points=60",
                 f"--run-dir={folder}", group=False) == [0]

    output = capfd.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"lr-find.png", "run"}
    assert "suggestion: --optim.lr" in output
    assert len([line for line in output.splitlines() if "e-0" in line]) >= 10
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_phases_and_operations_are_printed_and_the_trace_is_complete(ranks, tmp_path, capfd):
    assert ranks(1, within, str(tmp_path), "profile", "spiral", "--active=3", "--to=.",
                 group=False) == [0]

    output = capfd.readouterr().out
    phases, operations, *_ = output[output.index("phase  "):].split("\n\n")
    for phase in ("data", "forward", "backward and clip", "update", "between steps"):
        assert f"\n{phase} " in phases
    shares = [float(line.split()[-2]) for line in phases.splitlines() if line.endswith("%")]
    assert 99 < sum(shares) < 101
    assert "Self CPU %" in operations
    assert "aten::" in operations
    trace, = tmp_path.glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name == "phase: forward" for name in names) == 3 * 2
