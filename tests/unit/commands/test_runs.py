"""`runs`: which runs a folder has, their order, and that no text of a run controls the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.__main__ import main


def make(folder: Path, lr: float, accuracy: float, tail: str = "", task: str = "away:Task") -> None:
    """A run folder of an unfinished run, of a task that can't be imported."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"run": "1", "attempt": 0, "launch": null}')
    (folder / "config.toml").write_text(
        f'seed = 1\n{tail}\n[task]\nclass = "{task}"\n[optim]\nlr = {lr}\n')
    lines = [{"step": 1, "epoch": 0, "loss": 1.0, "lr": lr, "grad_norm": 1.0, "samples": 8},
             {"step": 1, "train_loss": 1.0, "val_loss": 2.0, "val_accuracy": accuracy,
              "val_samples": 9}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "runs/a", 0.1, 0.5)
    make(tmp_path / "runs/b", 0.2, 0.75)
    make(tmp_path / "c", 0.3, 0.25, tail='device = "\\u001b[31mred\\nline"')
    (tmp_path / "runs/notes").mkdir()
    return tmp_path


def test_the_runs_in_a_folder_are_sorted_with_the_settings_that_differ(folder, capsys):
    assert main(["runs", str(folder / "runs"), str(folder / "runs/a"), str(folder / "c")]) == 0

    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "val_accuracy", "val_loss", "wall", "time", "optim.lr", "device"]
    assert [row[0] for row in rows] == ["b", "a", "c"]
    assert rows[2][-1] == "\\x1b[31mred\\nline"

    assert main(["runs", str(folder / "runs"), "--sort", "optim.lr", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["settings"], second["settings"]) == ({"optim.lr": 0.1}, {"optim.lr": 0.2})
    assert first["run"] == str(folder / "runs/a")
    assert second["figures"]["val_accuracy"] == 0.75


def test_a_folder_without_runs_and_an_unknown_name_are_named(folder, capsys):
    assert main(["runs", str(folder / "runs/notes")]) == 2
    assert "notes: there is no run in this folder" in capsys.readouterr().err
    assert main(["runs", str(folder / "runs"), "--sort", "val_f1"]) == 2
    assert "--sort val_f1: " in capsys.readouterr().err
