"""Learning-rate range test: its suggestion, and that it leaves the run folder unchanged."""

from __future__ import annotations

import os

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


def find(folder: str, *arguments: str) -> tuple[int, list[str]]:
    """Run lr-find in a folder, in a rank. Return its exit code and the names in the folder."""
    os.chdir(folder)
    code = main(["lr-find", *arguments, "--world.threads=1", "--device=cpu"])
    return code, sorted(os.listdir())


def test_lr_find_prints_a_table_and_a_suggestion_and_leaves_the_run_unchanged(
    ranks, tmp_path, capfd
):
    folder = run(ranks, 1, tmp_path / "run", "spiral", "--task.points=300", "--device=cpu",
                 "--steps=5", "--eval.every=off")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    capfd.readouterr()

    (code, there), = ranks(1, find, str(tmp_path), "spiral", "--task.points=300", "--points=60",
                           f"--run-dir={folder}", group=False)

    output = capfd.readouterr().out
    assert (code, there) == (0, ["lr-find.png", "run"])
    assert "suggestion: --optim.lr" in output
    assert len([line for line in output.splitlines() if "e-0" in line]) >= 10
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
