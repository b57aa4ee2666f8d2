"""State of models, data and optimizers beside parameters and buffers: it is restored exactly, or
refused or reported before training."""

from __future__ import annotations

import pytest
from runs import train

from trainer.commands.compare import differences

TASK = ["--task=hidden_task:Hidden", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--steps=7", "--checkpoint.every=3"]  # fmt: skip
KILL = "--inject=kill:rank=1:step=5:phase=backward"


def codes(ranks, size: int, run, *arguments: str) -> list[int | None]:
    """The exit codes of the ranks, None for a death by signal."""
    ended = ranks.outcomes(size, train, *TASK, *arguments, f"--run-dir={run}", group=False)
    for outcome in ended:
        print(outcome.output)
    return [None if o.signal else (o.exit_code or o.value) for o in ended]


@pytest.mark.parametrize("arguments", [
    ["--task.way=assigns"], ["--task.way=caches"], ["--task.way=teacher"],
    ["--task.way=works in place"], ["--optim.name=hidden_task:Keeps"],
], ids=lambda arguments: arguments[0].partition("=")[2])  # fmt: skip
def test_state_that_a_checkpoint_holds_is_restored(ranks, tmp_path, arguments):
    assert codes(ranks, 2, tmp_path / "straight", *arguments) == [0, 0]

    assert codes(ranks, 2, tmp_path / "killed", *arguments, KILL) == [1, None]
    assert codes(ranks, 2, tmp_path / "killed", *arguments, KILL) == [0, 0]

    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))


@pytest.mark.parametrize(("way", "message"), [
    ("grows", "changes its buffer mean from (0, 4) float32 to (2, 4) float32"),
    ("adds", "forward has added, removed or unfrozen more.bias, more.weight"),
    ("one rank", "does not depend on the trainable parameters body.bias; freeze"),
    ("parts", "changes the parameters own differently on each rank"),
    ("data of a rank", 'dataset("train") on rank 1'),
])  # fmt: skip
def test_state_that_cannot_be_restored_or_differs_between_ranks_is_refused(
        ranks, tmp_path, capfd, way, message):
    assert codes(ranks, 2, tmp_path / "run", f"--task.way={way}") == [2, 2]

    assert message in capfd.readouterr().out
    assert not (tmp_path / "run/checkpoints").exists() or not any(
        (tmp_path / "run/checkpoints").glob("step-*"))


def test_a_step_with_unused_parameters_is_refused(ranks, tmp_path, capfd):
    way = "--task.way=leaves out"

    assert codes(ranks, 2, tmp_path / "run", way) == [2, 2]
    message = capfd.readouterr().out
    assert codes(ranks, 2, tmp_path / "run", way, "--parallel.find-unused=on") == [0, 0]

    assert "the loss of step 3, micro-batch 1, does not depend on body.weight, body.bias" in message


@pytest.mark.parametrize(("arguments", "message"), [
    (["--task.way=counts"], "the model's forward changes count, which no checkpoint holds; "),
    (["--task.way=counts elsewhere"], "a second computation of a micro-batch gives another loss"),
    (["--task.way=counting data"], "of the training data differ when they are read again"),
    (["--task.way=ordering data"], "or set_epoch() continues from the previous epoch; a restart"),
    (["--task.way=drawn data"], "training data cache the random numbers of their first read"),
    (["--optim.name=hidden_task:keeps_attribute"], "an update changes its attribute count"),
], ids=lambda value: value[0].partition("=")[2] if isinstance(value, list) else "")  # fmt: skip
def test_state_that_no_checkpoint_holds_is_reported(ranks, tmp_path, capfd, arguments, message):
    assert codes(ranks, 1, tmp_path / "run", "--steps=3", *arguments) == [0]

    assert message in capfd.readouterr().out


@pytest.mark.parametrize(("kept", "message"), [
    ("list", "its state has 'list', a list, for body.weight"),
    ("tensor", "its groups have 't', a Tensor"),
    ("elsewhere", "it has a state under 'all', which is not a parameter"),
    ("optimizer", "its attribute inner[0], a SGD, has a separate state (share the outer one: "
                  "self.inner[0].state = self.state)"),
])  # fmt: skip
def test_optimizer_state_that_no_checkpoint_holds_is_refused(
        ranks, tmp_path, capfd, kept, message):
    arguments = ["--optim.name=hidden_task:keeps_" + kept, "--checkpoint.every=off"]

    assert codes(ranks, 1, tmp_path / "run", *arguments) == [2]

    assert message in capfd.readouterr().out


@pytest.mark.parametrize("way", ["", "draws"])
def test_nothing_is_reported_without_hidden_state(ranks, tmp_path, capfd, way):
    assert codes(ranks, 1, tmp_path / "run", "--steps=3", f"--task.way={way}") == [0]

    assert "warning" not in capfd.readouterr().out
