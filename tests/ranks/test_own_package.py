"""examples/wave_forms: a user's package, used from another folder with nothing of ours edited."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from runs import run, steps, summary, train, until_done, validations

from trainer.commands.compare import differences

EXAMPLE = Path(__file__).parents[2] / "examples/wave_forms"
SHORT = (str(EXAMPLE / "waves.toml"), "--epochs=2", "--task.samples=320", "--checkpoint.every=2",
         "--device=cpu")  # fmt: skip


def elsewhere(folder: str, *arguments: str) -> int:
    """In a rank: as a user in a folder of their own, who has the package on the path."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLE))
    return train(*arguments)


def test_a_killed_run_of_the_users_package_has_the_same_bits(ranks, tmp_path, capfd):
    straight = run(ranks, 2, tmp_path / "straight", str(tmp_path), *SHORT, function=elsewhere)

    ends = until_done(ranks, 2, tmp_path / "run", str(tmp_path), *SHORT,
                      "--inject=kill:rank=1:step=4:phase=backward", function=elsewhere)

    assert ends == [[1, -9], [0, 0]]
    assert not list(differences(straight, tmp_path / "run"))
    curve = [text.split(",") for text in (tmp_path / "run/curve.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in curve] == [
        (line["step"], line["loss"]) for line in steps(tmp_path / "run")]
    assert "val_worst_recall" in validations(tmp_path / "run")[0]

    capfd.readouterr()
    assert ranks(1, elsewhere, str(tmp_path), "evaluate", "run", "--checkpoint=best", "--json",
                 group=False) == [0]
    said = capfd.readouterr().out
    found = json.loads(next(text for text in said.splitlines() if text.startswith("{")))
    assert found["test"] == summary(tmp_path / "run")["test"]

    ranks(1, elsewhere, str(tmp_path), "predict", "run", "--out=p.jsonl", group=False)

    lines = [json.loads(text) for text in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 80
    assert all(line["form"] in range(4) and 0.25 <= line["share"] <= 1 for line in lines)
