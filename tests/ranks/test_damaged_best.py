"""Best weights in an older checkpoint that are damaged: made again, or said to be lost."""

from __future__ import annotations

import json

from runs import train, validations

from trainer.commands.compare import differences

# The validation loss falls, so that the best weights are those of the first validation, step 2.
BEST = 2
RUN = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--steps=8",
       "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=40",
       "--task.validation=6", "--eval.every=2", "--checkpoint.every=1",
       "--eval.best=val_loss:max"]  # fmt: skip


def damage(run, step):
    path = run / f"checkpoints/step-{step:08d}/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_start_goes_back_to_before_the_best_weights_and_makes_them_again(ranks, tmp_path):
    straight, harmed = tmp_path / "straight", tmp_path / "harmed"
    assert ranks(2, train, *RUN, f"--run={straight}", group=False) == [0, 0]
    again = [*RUN, f"--inject=term:step={BEST + 1}:rank=1", f"--run={harmed}"]
    assert ranks(2, train, *again, group=False) == [75, 75]
    damage(harmed, BEST)

    assert ranks(2, train, *again, group=False) == [0, 0]

    assert list(differences(straight, harmed)) == []
    summary = json.loads((harmed / "summary.json").read_text())
    assert summary["model.safetensors"].startswith(f"the weights of step {BEST}, which have")


def test_best_weights_that_nothing_makes_again_give_way_to_the_last_and_it_is_said(
    ranks, tmp_path, capfd
):
    harmed = tmp_path / "harmed"
    command = [*RUN, "--inject=term:step=6", f"--run={harmed}", "--checkpoint.keep=1"]
    assert ranks(2, train, *command, group=False) == [75, 75]
    damage(harmed, BEST)

    assert ranks(2, train, *command, group=False) == [0, 0]

    assert f"the best weights, of step {BEST}, are lost" in "".join(capfd.readouterr())
    losses = {line["step"]: line["val_loss"] for line in validations(harmed)}
    assert max(losses, key=losses.get) == BEST
    summary = json.loads((harmed / "summary.json").read_text())
    assert summary["model.safetensors"] == "the weights of step 8, the last step"
    product = (harmed / "model.safetensors").read_bytes()
    assert product == (harmed / "checkpoints/step-00000008/model.safetensors").read_bytes()
