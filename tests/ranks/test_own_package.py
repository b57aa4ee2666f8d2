"""examples/wave_forms: a user's package, used from another folder with nothing of ours edited."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from runs import run, steps, summary, train, until_done, validations

from trainer.commands.compare import differences

EXAMPLE = Path(__file__).parents[2] / "examples/wave_forms"
SHORT = ["--epochs=2", "--task.samples=320", "--checkpoint.every=2", "--device=cpu"]


def elsewhere(folder: str, *arguments: str) -> int:
    """In a rank: as a user in a folder of their own, who has the package on the path."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLE))
    return train(str(EXAMPLE / "waves.toml"), *SHORT, *arguments)


def command(folder: str, *arguments: str) -> int:
    """In a rank: a command that reads a run."""
    from trainer.__main__ import main

    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLE))
    return main([*arguments, "--world.threads=1"])


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_killed_run_of_the_users_package_has_the_same_bits(ranks, tmp_path, capfd, size):
    kill = f"--inject=kill:rank={size - 1}:step=4:phase=backward"
    straight = run(ranks, size, tmp_path / "straight", str(tmp_path), function=elsewhere)

    ends = until_done(ranks, size, tmp_path / "run", str(tmp_path), kill, function=elsewhere)

    assert [ends[0][-1], *ends[1:]] == [-9, [0] * size]
    assert not list(differences(straight, tmp_path / "run"))
    curve = [text.split(",") for text in (tmp_path / "run/curve.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in curve] == [
        (line["step"], line["loss"]) for line in steps(tmp_path / "run")]
    assert "val_worst_recall" in validations(tmp_path / "run")[0]

    capfd.readouterr()
    for split, checkpoint in (("validation", "last"), ("test", "best")):
        codes = ranks(1, command, str(tmp_path), "evaluate", "run", f"--checkpoint={checkpoint}",
                      "--json", group=False)
        said = capfd.readouterr().out
        found = json.loads(next(t for t in said.splitlines() if t.startswith("{")))
        logged = summary(tmp_path / "run")["test"]
        if split == "validation":
            logged = {name.removeprefix("val_"): value for name, value in
                      validations(tmp_path / "run")[-1].items()
                      if name.startswith("val_") and name != "val_table"}
        assert codes == [0]
        assert found[split] == logged


def test_the_package_predicts_what_it_wants_to(ranks, tmp_path):
    ranks(1, elsewhere, str(tmp_path), "--run-dir=run", "--steps=2", group=False)

    ranks(1, command, str(tmp_path), "predict", "run", "--out=p.jsonl", group=False)

    lines = [json.loads(text) for text in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert all(line["form"] in range(4) and 0.25 <= line["share"] <= 1 for line in lines)
