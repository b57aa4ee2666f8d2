"""Each change that a resumed run offers to accept works, exactly; others are not offered."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import TAPE, run, steps, summary

from trainer.commands.compare import differences

RUN = (*TAPE, "--task.norm=batch", "--task.samples=80", "--epochs=2", "--checkpoint.every=5")
"""Ten steps of eight samples per epoch."""
FREEZE = "--freeze=body.*"

OFFERED: dict[str, tuple[tuple[str, ...], tuple[str, ...], int, str]] = {
    "batch.global-size": ((), ("--batch.global-size=16",), 17, "continues in epoch 2 after 40 of "
                          "its 80 samples: no sample is seen twice; the run now has 17 steps"),
    "batch.micro-size": ((), ("--batch.micro-size=4",), 20, ""),
    "data.drop-last": (("--task.samples=84",), ("--data.drop-last=off",), 21, "no sample is seen"),
    "data.shuffle": ((), ("--data.shuffle=off",), 20, "some samples of this epoch are seen twice"),
    "seed data": ((), ("--seed=3",), 20, "some samples of this epoch are seen twice"),
    "task.dropout": ((), ("--task.dropout=0.3",), 20, ""),
    "task.samples data": ((), ("--task.samples=56",), 17,
                          "continues in epoch 2 after 40 of its 56"),
    "optim.name": ((), ("--optim.name=sgd",), 20, ""),
    "optim.name ": (("--optim.name=sgd", "--schedule.name=one-cycle"), ("--optim.name=adamw",),
                    20, ""),
    "freeze": ((FREEZE, "--optim.ema=0.5"), ("--freeze=body.0.*",), 20, ""),
    "freeze ": ((FREEZE, "--optim.name=sgd"), (), 20, ""),
    "freeze  ": (("--optim.name=torch.optim:RMSprop", "--schedule.name=plateau",
                  "--task.validation=6", "--eval.every=5"), (FREEZE,), 20, "")}
"""Names to be accepted → flags before; flags after; the last step; what is said. The run stops
after step 15, in the middle of the second epoch."""


@pytest.mark.parametrize("accepted", OFFERED)
def test_an_accepted_change_continues_exactly(ranks, tmp_path, capfd, accepted):
    before, after, last, said = OFFERED[accepted]
    after = after if accepted.startswith("freeze") else (*before, *after)
    if accepted.startswith("freeze"):
        after = (*(flag for flag in before if flag != FREEZE), *after)
    stopped = run(ranks, 1, tmp_path / "run", *RUN, *before, "--inject=term:step=15", code=75)
    run(ranks, 1, stopped, *RUN, *after, code=2)
    flags = re.findall(r"--accept \S+", capfd.readouterr().out.split("continue anyway with ")[1])
    assert [flag.split()[1].rstrip(".") for flag in flags] == accepted.split()
    accept = [f"--accept={name}" for name in accepted.split()]

    straight = Path(shutil.copytree(stopped, tmp_path / "straight"))
    run(ranks, 1, straight, *RUN, *after, *accept)
    output = capfd.readouterr().out
    run(ranks, 1, stopped, *RUN, *after, *accept, "--inject=term:step=16", code=75)
    run(ranks, 1, stopped, *RUN, *after)

    assert said in output
    assert "random state" not in output
    assert summary(straight)["step"] == len(steps(straight)) == last
    assert list(differences(straight, stopped)) == []


@pytest.mark.parametrize(("before", "after", "message"), [
    ((), ("--task.width=4",), r"--task: the model doesn't fit the run's checkpoint of step 3: "
     r"body.0.weight has shape \[16, 3\] in the checkpoint and \[16, 4\] now"),
    ((), ("--init=/there",), "--init was None and is '/there': the run has its weights already"),
    (("--task=stream_task:StreamTape", "--task.kind=measured"), ("--batch.global-size=16",),
     "--batch.global-size was 8 and is 16: the position in a stream")])
def test_a_change_that_cannot_be_continued_offers_no_flag(
    ranks, tmp_path, capfd, before, after, message
):
    stopped = run(ranks, 1, tmp_path / "run", *RUN, *before, "--inject=term:step=3", code=75)
    run(ranks, 1, stopped, *RUN, *before, *after, code=2)
    error = capfd.readouterr().out
    assert re.search(message, error)
    assert "--accept" not in error


def rates(folder: Path) -> list[Any]:
    return [line["lr"] for line in steps(folder)]


def test_a_longer_run_says_where_its_rate_ends_and_can_be_planned_again(ranks, tmp_path, capfd):
    flags = (*TAPE, "--task.samples=80", "--schedule.name=linear", "--schedule.min-ratio=0",
             "--schedule.warmup=off")
    short = run(ranks, 1, tmp_path / "run", *flags, "--steps=10")
    longer = Path(shutil.copytree(short, tmp_path / "longer"))
    capfd.readouterr()

    run(ranks, 1, short, *flags, "--steps=15")
    output = "".join(capfd.readouterr())
    run(ranks, 1, longer, *flags, "--steps=15", "--schedule.replan=on", "--inject=term:step=12",
        code=75)
    run(ranks, 1, longer, *flags, "--steps=15", "--schedule.replan=on")
    again = "".join(capfd.readouterr())

    warning = ("--schedule.name linear reaches its last rate, 0, with step 10: the other 5 of 15 "
               "steps change no weights; --schedule.replan on plans it over 15 steps")
    assert warning in output
    assert warning not in again
    assert rates(short)[10:] == [0.0] * 5
    assert rates(longer)[10:] == pytest.approx([3e-3 * n / 14 for n in (4, 3, 2, 1, 0)])
