"""State of models, data and optimizers beside parameters and buffers: it is restored exactly, or
refused or reported before training."""

from __future__ import annotations

import pytest
from runs import TAPE, run, until_done

from trainer.commands.compare import differences

TASK = (*TAPE[1:-1], "--task=hidden_task:Hidden", "--steps=7", "--checkpoint.every=3")
KILL = "--inject=kill:rank=1:step=5:phase=backward"


@pytest.mark.parametrize("flag", [
    "task.way=assigns", "task.way=grows", "task.way=caches", "task.way=teacher",
    "task.way=works in place", "optim.name=hidden_task:Keeps"])
def test_state_that_a_checkpoint_holds_is_restored(ranks, undisturbed, tmp_path, flag):
    arguments = [*TASK, f"--{flag}"]

    assert until_done(ranks, 2, tmp_path / "run", *arguments, KILL) == [[1, -9], [0, 0]]

    assert not list(differences(undisturbed(2, *arguments), tmp_path / "run"))


@pytest.mark.parametrize(("flag", "message"), [
    ("task.way=adds", "forward has added, removed, replaced or unfrozen more.bias, more.weight"),
    ("task.way=counts", "The forward changes count. (--start-checks off"),
    ("task.way=counts elsewhere",
     "a second computation of the first micro-batch gives another Outcome.total"),
    ("task.way=one rank", "does not depend on the trainable parameters body.bias; freeze"),
    ("task.way=parts", "changes the parameters own differently on each rank"),
    ("task.way=data of a rank", 'dataset("train") on rank 1'),
    ("optim.name=hidden_task:keeps_list", "its state has 'list', a list, for body.weight"),
    ("optim.name=hidden_task:keeps_tensor", "its groups have 't', a Tensor"),
    ("optim.name=hidden_task:keeps_elsewhere",
     "it has a state under 'all', which is not a parameter"),
    ("optim.name=hidden_task:keeps_optimizer", "its next update would not be the same after a"),
    ("optim.name=hidden_task:keeps_attribute", "its next update would not be the same after a"),
])  # fmt: skip
def test_state_that_cannot_be_restored_or_differs_between_ranks_is_refused(
    ranks, tmp_path, capfd, flag, message
):
    run(ranks, 2, tmp_path / "run", *TASK, f"--{flag}", code=2)

    assert message in capfd.readouterr().out
    assert not list(tmp_path.glob("run/checkpoints/step-*"))


def test_a_step_with_unused_parameters_is_refused(ranks, tmp_path, capfd):
    folder = run(ranks, 2, tmp_path / "run", *TASK, "--task.way=leaves out", code=2)
    message = capfd.readouterr().out
    run(ranks, 2, folder, *TASK, "--task.way=leaves out", "--parallel.find-unused=on")

    assert "the loss of step 3, micro-batch 1, does not depend on body.weight, body.bias" in message


@pytest.mark.parametrize(("flag", "message"), [
    ("task.way=acts later", "the forward changes CALLS, which no checkpoint holds; "),
    ("task.way=ordering data", "or set_epoch() continues from the previous epoch; a restart"),
])  # fmt: skip
def test_state_that_no_checkpoint_holds_is_reported(ranks, tmp_path, capfd, flag, message):
    run(ranks, 1, tmp_path / "run", *TASK, "--steps=3", f"--{flag}")

    assert message in capfd.readouterr().out
