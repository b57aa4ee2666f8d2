"""`report` and `runs`: the page and the tables of one or more runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.commands.report.figures import run_table, sort_runs
from trainer.commands.report.history import History

ACCURACIES = {"low": [0.5, 0.4], "high": [0.2, 0.9], "middle": [0.7, 0.6], "none": []}
RATES = {"low": 0.1, "high": 0.2, "middle": 0.05, "none": 0.1}


def folder(path: Path, rate: float, accuracies: list[float], settings: str = "") -> Path:
    """A run folder that was validated with these accuracies, of a task that can't be imported."""
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    (path / "config.toml").write_text(
        f'seed = 1\n{settings}\n[task]\nclass = "away:Task"\n[optim]\nlr = {rate}\n')
    (path / "environment.json").write_text(json.dumps({"class_names": ["<cat>", "dog"]}))
    lines = [{"step": step, "loss": 1 / step, "lr": rate, "grad_norm": 1.0, "samples": 8,
              "epoch": 0} for step in range(1, 71)]
    lines += [{"step": 35 * number, "train_loss": 1.0, "val_loss": 1 - accuracy,
               "val_accuracy": accuracy, "val_samples": 9, "val_table": [[number, 1], [2, 5]]}
              for number, accuracy in enumerate(accuracies, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    root = tmp_path_factory.mktemp("runs")
    return [str(folder(root / name, RATES[name], found)) for name, found in ACCURACIES.items()]


@pytest.mark.parametrize(("by", "expected"), [
    ([], "high middle low none"), (["--sort", "val_accuracy"], "high middle low none"),
    (["--sort=val_accuracy:min"], "low middle high none"),
    (["--sort=val_loss"], "high middle low none"), (["--sort=optim.lr"], "middle low none high"),
    (["--sort=optim.lr:max"], "high low none middle")])
def test_runs_are_sorted_by_their_best_validation_or_a_setting(runs, capsys, by, expected):
    assert main(["report", *runs, *by, "--text"]) == 0

    head, *rows = [text.split() for text in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == expected.split()
    assert sorted(head) == sorted(["run", "val_accuracy", "val_loss", "wall", "time", "optim.lr"])
    high = rows[expected.split().index("high")]
    assert sorted(high) == sorted(["high", "0.9000", "0.1000", "0", "s", "0.2"])
    assert not Path(runs[0], "report.html").exists()


def test_an_unknown_figure_is_refused_with_the_known_ones(runs, capsys):
    for command in ("report", "runs"):
        assert main([command, *runs, "--sort", "val_acc"]) == 2
        error = capsys.readouterr().err
        assert "--sort val_acc: write NAME" in error
        assert "val_accuracy" in error


def test_runs_lists_those_of_each_folder_once_and_no_text_of_a_run_controls_the_terminal(
    runs, tmp_path, capsys
):
    folder(tmp_path / "other", 0.3, [0.25], 'device = "\\u001b[31mred\\nline"')
    assert main(["runs", str(Path(runs[0]).parent), runs[1], str(tmp_path / "other")]) == 0

    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["run", "val_accuracy", "val_loss", "wall", "time", "optim.lr", "device"]
    assert [row[0] for row in rows] == ["high", "middle", "low", "other", "none"]
    assert rows[3][-1] == "\\x1b[31mred\\nline"
    (tmp_path / "notes").mkdir()
    assert main(["runs", str(tmp_path / "notes")]) == 2
    assert "notes: there is no run in this folder" in capsys.readouterr().err


def test_runs_has_figures_and_settings_as_json(runs, capsys):
    assert main(["runs", *runs[:2], "--sort", "optim.lr", "--json"]) == 0

    first, second = json.loads(capsys.readouterr().out)
    assert (first["settings"], second["settings"]) == ({"optim.lr": 0.1}, {"optim.lr": 0.2})
    assert (first["run"], second["figures"]["val_accuracy"]) == (runs[0], 0.9)


def test_a_single_run_has_its_figures_as_text(runs, capsys):
    assert main(["report", runs[1], "--text"]) == 0
    assert ["steps", "70"] in [text.split() for text in capsys.readouterr().out.splitlines()]


def test_the_page_of_several_runs_begins_with_their_table(runs, tmp_path, capsys):
    assert main(["report", *runs, "--out", str(tmp_path)]) == 0

    page = (tmp_path / "report.html").read_text()
    titles = [part.partition("<")[0] for part in page.split("<h2>")[1:]]
    assert titles[:3] == ["Runs", "Loss", "Accuracy"]
    assert "<h1>4 runs</h1>" in page
    assert ('<tr class="differs"><td>optim.lr</td><td>0.2</td><td>0.05</td><td>0.1</td>'
            '<td>0.1</td></tr>') in page
    assert page.count('class="differs"') == 1
    assert titles.index("Summary") < titles.index("Confusion of high")
    table = page[page.index("<h2>Runs"):page.index("<h2>Loss")]
    assert "optim.lr" in table
    assert "seed" not in table
    assert (table.index("high") < table.index("middle") < table.index("low")
            < table.index("none"))


def test_a_page_has_the_classes_and_says_which_curve_is_averaged(runs, tmp_path):
    shutil.copytree(runs[1], run := tmp_path / "run")

    assert main(["report", str(run)]) == 0

    page = (run / "report.html").read_text()
    assert "Classes, validation at step 70" in page
    assert "<tr class=\"\"><td>&lt;cat&gt;</td><td>3</td><td>0.5000</td><td>0.6667</td>" in page
    assert "training, averaged over about 2 %" in page
    assert page.count("training, averaged</text>") == 2  # in legends; the axes name the figures
    assert (run / "report/confusion.png").exists()


def test_runs_without_a_validation_are_sorted_by_their_loss():
    found = [History(name=str(loss), path=Path(), events=[], validations=[], timing=[], config={},
                     steps=[{"step": 1, "loss": loss}], environment={}, summary=None)
             for loss in (3.0, 1.0, 2.0)]

    assert [run.name for run in sort_runs(found, None)] == ["1.0", "2.0", "3.0"]
    assert run_table(found, None)[0] == ["run", "loss", "wall time"]
