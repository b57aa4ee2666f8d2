"""Models whose buffers begin to change late or take another shape, with modules in evaluation mode,
and optimizers with weights for evaluation: a killed run has the bits of an undisturbed one."""

from __future__ import annotations

import pytest
import torch
from runs import run, state, steps, until_done, validations, weights

from trainer.commands.compare import differences
from trainer.run.saved_run import open_saved_run

TASK = ("--task=changing_task:Changing", "--device=cpu", "--data.workers=0",
        "--batch.global-size=8", "--batch.micro-size=2", "--steps=14", "--eval.every=5",
        "--optim.lr=0.01", "--parallel.verify-every=1")  # fmt: skip
KILL = ("--inject=kill:rank=1:step=4:phase=backward", "--inject=kill:rank=1:step=8:phase=backward")


def evaluated(folder, checkpoint: str) -> float:
    evaluator = open_saved_run(folder, checkpoint=checkpoint).evaluator("validation")
    return evaluator().loss


@pytest.mark.parametrize(("size", "flag"), [
    (2, "task.way=late"), (3, "task.way=late"), (2, "task.way=grows"), (3, "task.way=grows"),
    (2, "task.way=quantized"), (2, "task.way=frozen"), (2, "task.way=no return"),
    (2, "optim.name=changing_task:Averaging")])
def test_a_killed_run_has_the_bits_of_an_undisturbed_one(ranks, undisturbed, tmp_path, size, flag):
    arguments = [*TASK, f"--{flag}"]

    straight = undisturbed(size, *arguments)
    until_done(ranks, size, tmp_path / "killed", *arguments, *KILL)

    assert not list(differences(straight, tmp_path / "killed"))
    assert "divergence" not in (straight / "events.jsonl").read_text()
    logged = {line["step"]: line["val_loss"] for line in validations(straight)}
    best = min(logged, key=logged.get)
    assert evaluated(straight, "best") == logged[best]
    assert evaluated(straight, "last") == logged[14]


@pytest.mark.parametrize("way", ["late", "grows"])
def test_under_the_canonical_reduction_buffers_do_not_depend_on_ranks(
    ranks, undisturbed, tmp_path, way
):
    arguments = [*TASK, f"--task.way={way}", "--parallel.reduction=canonical"]

    one = undisturbed(1, *arguments)
    until_done(ranks, [3, 2, 1], tmp_path / "elastic", *arguments, *KILL)

    assert not list(differences(one, tmp_path / "elastic"))


def test_a_validation_does_not_change_the_bits_of_an_averaging_optimizer(
    ranks, undisturbed, tmp_path
):
    arguments = [*TASK, "--optim.name=changing_task:Averaging"]
    often = undisturbed(2, *arguments)

    once = run(ranks, 2, tmp_path / "once", *arguments, "--eval.every=off")

    assert steps(often) == steps(once)
    assert all(torch.equal(t, weights(often, 14)[n]) for n, t in weights(once, 14).items())
    assert state(often, 14)["optimizer"] == state(once, 14)["optimizer"]
    assert state(often, 14)["optimizer"]["groups"][0]["train_mode"] is True
    assert validations(often)[-1] == validations(once)[-1] | {
        k: v for k, v in validations(often)[-1].items() if k == "train_loss"}
