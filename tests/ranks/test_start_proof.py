"""The proof at the start: a task that can't be exact is refused before the first step, by name."""

from __future__ import annotations

import pytest
from runs import run

TASK = ("--device=cpu", "--data.workers=0", "--batch.global-size=16", "--batch.micro-size=4",
        "--steps=6", "--checkpoint.every=2", "--eval.every=off")  # fmt: skip
OPTIMIZER = "--task=brought_task:Regression", "--optim.name"


@pytest.mark.parametrize(("arguments", "message"), [
    (["--task=brought_task:Mean"], "Outcome.total of a batch is"),
    (["--task=brought_task:HiddenStatistics"],
     "after training forwards, an evaluation of the first samples gives another Outcome.total"),
    ([*OPTIMIZER, "brought_task:Listing"], "not be the same after a restart (weight: history"),
])
def test_a_task_that_cannot_be_exact_is_refused_by_name(ranks, tmp_path, capfd, arguments, message):
    run(ranks, 2, tmp_path / "run", *TASK, *arguments, code=2)

    assert message in capfd.readouterr().out
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_what_shows_after_two_updates_is_refused_at_each_start(ranks, tmp_path, capfd):
    arguments = *TASK, "--task=brought_task:HiddenTeacher"
    for _ in range(2):
        run(ranks, 2, tmp_path / "run", *arguments, code=2)

        assert ("after two updates, a second computation of the first samples gives another "
                "Outcome.total") in capfd.readouterr().out


def test_the_checks_can_be_switched_off(ranks, tmp_path):
    run(ranks, 2, tmp_path / "run", *TASK, "--task=brought_task:Mean", "--start-checks=off")


@pytest.mark.parametrize(("name", "message"), [
    ("Regression", ""), ("Unusual --precision.dtype=bf16", "depends on batch statistics in eval"),
    ("OnlyTraining", "can't be computed in eval mode, so it isn't checked"),
    ("Grouped", "can't be computed in eval mode, so it isn't checked"),
    ("Reentrant", "gives no gradient to adapter.weight, so it is not trained")])
def test_what_cannot_be_checked_or_is_not_trained_is_reported(ranks, tmp_path, capfd, name,
                                                              message):
    run(ranks, 1, tmp_path / "run", *TASK, *f"--task=brought_task:{name}".split())

    output = capfd.readouterr().out
    assert message in output
    assert ("warning" in output) == bool(message)


def test_layers_that_training_leaves_out_at_random_pass(ranks, tmp_path, capfd):
    run(ranks, 2, tmp_path / "run", *TASK, "--task=brought_task:LayerDrop",
        "--parallel.find-unused=on", "--batch.global-size=32", "--batch.micro-size=16")

    assert "is not trained" not in capfd.readouterr().out
