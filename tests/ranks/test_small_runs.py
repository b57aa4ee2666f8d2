"""Small runs before a long one: limited data, one batch again and again, a dry run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs import TAPE, run, steps, summary, until_done
from stream_task import LANE
from tape_task import read_tape

from trainer.__main__ import main
from trainer.commands.compare import differences
from trainer.errors import ConfigError

SMALL = ("spiral", "--task.points=300", "--device=cpu", "--batch.micro-size=25",
         "--checkpoint.every=4", "--eval.every=5")
CANONICAL = ("--parallel.reduction=canonical",)


@pytest.mark.parametrize(("arguments", "limit", "first"), [
    (["--task.samples=160"], 16, {*range(16)}),
    (["--task=stream_task:StreamTape", "--task.samples=26"], 16, {*range(16)}),
    (["--task=stream_task:StreamTape", "--task.samples=26", "--data.drop-last=off"], 13,
     {*range(13)}),
    (["--task=stream_task:StreamTape", "--task.kind=lanes", "--task.sizes=9,6,7,10",
      "--data.drop-last=off"], 11,
     {LANE * lane + place for lane, size in enumerate((4, 3, 2, 2)) for place in range(size)}),
])  # fmt: skip
def test_an_epoch_has_the_first_samples_only_on_any_number_of_ranks(
    ranks, tmp_path, arguments, limit, first
):
    found = []
    for size in (1, 2):
        tape = f"--task.tape={tmp_path}/tape-{size}"
        folder = run(ranks, size, tmp_path / f"run-{size}", *TAPE[:-1], *arguments, tape,
                     f"--data.limit={limit}", "--steps=4")
        read = [index for tape in read_tape(tmp_path / f"tape-{size}", size) for line in tape
                for index, epoch in zip(line["ids"], line["epochs"], strict=True)
                if epoch == 0 and line["counts"]]
        assert set(read) == first
        found.append([line["samples"] for line in steps(folder)])
    assert found[0] == found[1] == ([8, limit - 8] * 2)


@pytest.mark.parametrize(("sizes", "more"), [
    (2, ["--overfit=12"]), ([3, 2], ["--overfit=12", *CANONICAL]),
    ([3, 2], ["--data.limit=150", "--steps=12", *CANONICAL])])
def test_a_killed_small_run_ends_with_the_same_bits_and_says_how_the_loss_fell(
    ranks, tmp_path, capfd, sizes, more
):
    straight = run(ranks, 2, tmp_path / "straight", *SMALL, *more)
    losses = [line["loss"] for line in steps(straight)]
    output = capfd.readouterr().out

    codes = until_done(ranks, sizes, tmp_path / "killed", *SMALL, *more,
                       "--inject=kill:rank=1:step=7")

    assert len(codes) == 2
    assert not [*differences(straight, tmp_path / "killed")]
    if "--overfit=12" in more:
        assert summary(straight)["overfit"] == {
            "first": losses[0], "last": losses[-1], "steps": 12, "fell": True}
        assert f"the loss of one batch went from {losses[0]:.4g} to {losses[-1]:.4g}" in output
        assert summary(straight)["test"] is None


def test_a_loss_that_does_not_fall_is_code_2_each_time(ranks, tmp_path, capfd):
    for _ in range(2):
        run(ranks, 2, tmp_path / "run", *SMALL, "--overfit=12", "--optim.lr=1e-12", code=2)
        assert "--overfit 12: the loss of one batch" in capfd.readouterr().out


def dry_run(folder: str, *arguments: str) -> int:
    os.chdir(folder)
    code = main([*arguments, "--task.points=300", "--world.threads=1", "--device=cpu"])
    assert not [*Path(folder).iterdir()], "nothing is kept"
    return code


def test_a_dry_run_walks_through_everything_and_keeps_nothing(ranks, tmp_path, capfd):
    (outcome,) = ranks.outcomes(1, dry_run, str(tmp_path), "spiral", "--steps=3", "--dry-run",
                                group=False)

    assert outcome.value == 0, outcome.output
    for part in ("bytes at step 1", "continued from step 1", "bytes at step 3",
                 "validation loss", "test loss", "largest difference 0"):
        assert part in outcome.output


@pytest.mark.parametrize("arguments", [["--overfit=9", "--epochs=2"],
                                       ["--overfit=9", "--data.limit=3"]])
def test_lengths_that_contradict_the_one_batch_are_refused(arguments):
    from trainer.config.command_line import parse_config

    with pytest.raises(ConfigError, match=r"--overfit 9: it .*; omit --"):
        parse_config(arguments)
