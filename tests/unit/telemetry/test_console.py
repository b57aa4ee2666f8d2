"""Console: the progress bar and its metrics on a terminal, plain lines elsewhere, colours."""

from __future__ import annotations

import io
import itertools

import pytest

from trainer.telemetry.console import LEAST_BAR, Console
from trainer.telemetry.events import Log

LINE = {"step": 0, "epoch": 0, "loss": 0.5, "lr": 1e-3, "grad_norm": 2.0, "samples": 64,
        "accuracy": 0.75}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_of_training_and_validation_have_the_same_columns():
    stream, clock = io.StringIO(), itertools.count()
    console = Console(Log(stream=stream), total=100, every=50, start=0, bar=False, restarts=2,
                      clock=lambda: next(clock))
    notes = iter(["mirror 42 s behind"])
    console.show_note(lambda: next(notes, ""))

    console.step({**LINE, "step": 49}, {"step": 0.5})
    console.step({**LINE, "step": 50}, {"step": 0.5})
    console.validation({"step": 50, "train_loss": 0.6, "val_loss": 0.4, "val_accuracy": 0.8,
                        "val_samples": 10, "val_table": [[1, 0], [0, 1]]})

    assert stream.getvalue().splitlines() == [
        "step  50/100  loss  0.5000  accuracy 0.750  lr 1.00e-03  norm 2.00  128 samples/s  "
        "ETA 0:00:01  restarts 2  mirror 42 s behind",
        "step  50/100  loss  0.4000  accuracy 0.800  (validation; epoch 0, lr 1.00e-03, "
        "training loss 0.6000)"]


@pytest.mark.parametrize(("columns", "total", "figures"), [
    (60, 100, "loss 0.5000  accuracy 0.750"),
    (80, 100, "loss 0.5000  accuracy 0.750  128 samples/s"),
    (80, 37500, "loss 0.5000  accuracy 0.750  128 samples/s"),
    (140, 37500, "loss 0.5000  accuracy 0.750  128 samples/s  restarts 1  lr 1.00e-03  norm 2.00  "
                 "f1 0.700")])
def test_the_bar_shows_the_figures_that_fit_and_the_time_of_the_whole_run(
        monkeypatch, capsys, columns, total, figures):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (columns, 24))
    console = Console(Log(), total=total, every=50, start=total - 3, bar=True, restarts=1,
                      earlier_s=5000.0)

    for step in range(total - 2, total + 1):
        console.step({**LINE, "f1": 0.7, "step": step}, {"step": 0.5})
    console.close()

    shown = capsys.readouterr().err.split("\r")[-1].rstrip("\n")
    bar, _, text = shown.partition("| ")
    assert len(shown) == columns
    assert len(bar) >= LEAST_BAR
    assert text == f"{total}/{total} 1:23:20<00:00  {figures}"


def test_lines_beside_the_bar_go_to_stderr(capsys):
    console = Console(log := Log(), total=9, every=1, start=0, bar=True)

    log.warning("look")
    console.close()

    output = capsys.readouterr()
    assert output.out == ""
    assert "warning: look\n" in output.err


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, "\x1b[33mwarning: \x1b[0mlook\n"), ({"NO_COLOR": "1"}, "warning: look\n"),
    ({"TERM": "dumb"}, "warning: look\n")])
def test_a_warning_has_a_colour_on_a_terminal_unless_colours_are_off(
        monkeypatch, variables, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terminal, pipe = Terminal(), io.StringIO()

    Log(stream=terminal).warning("look")
    Log(stream=pipe).warning("look")

    assert terminal.getvalue() == expected
    assert pipe.getvalue() == "warning: look\n"
