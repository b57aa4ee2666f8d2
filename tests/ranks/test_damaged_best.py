"""Damaged best weights in an older checkpoint: computed again, or reported as lost."""

from __future__ import annotations

import json

from runs import train, validations

from trainer.commands.compare import differences
from trainer.telemetry.events import read_events

RUN = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--steps=8",
       "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=40",
       "--task.validation=6", "--eval.every=2", "--checkpoint.every=1"]  # fmt: skip


def damage(run, step):
    path = run / f"checkpoints/step-{step:08d}/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def best_in_checkpoint(run, step):
    facts = json.loads((run / f"checkpoints/step-{step:08d}/state.json").read_text())
    return facts["best"]["step"]


def test_damaged_best_weights_end_the_attempt_and_the_next_one_computes_them_again(
    ranks, tmp_path, capfd
):
    straight, harmed = tmp_path / "straight", tmp_path / "harmed"
    command = [*RUN, "--eval.best=val_loss:max"]
    assert ranks(2, train, *command, f"--run-dir={straight}", group=False) == [0, 0]
    again = [*command, "--inject=term:step=3:rank=1", f"--run-dir={harmed}"]
    assert ranks(2, train, *again, group=False) == [75, 75]
    assert best_in_checkpoint(harmed, 3) == 2
    damage(harmed, 2)

    assert ranks(2, train, *again, group=False) == [1, 1]
    assert ranks(2, train, *again, group=False) == [0, 0]

    assert "best weights, of step 2, are damaged. The next start continues from step 1" in (
        "".join(capfd.readouterr()))
    restored = [e["at_step"] for e in read_events(harmed / "events.jsonl")
                if e["event"] == "restore"]
    assert restored == [3, 1]
    assert list(differences(straight, harmed)) == []


def test_best_weights_that_cannot_be_computed_again_are_replaced_by_the_last_with_a_warning(
    ranks, tmp_path, capfd
):
    harmed = tmp_path / "harmed"
    command = [*RUN, "--eval.best=val_loss:max", "--inject=term:step=6", f"--run-dir={harmed}",
               "--checkpoint.keep=1"]
    assert ranks(2, train, *command, group=False) == [75, 75]
    assert best_in_checkpoint(harmed, 6) == 2
    damage(harmed, 2)

    assert ranks(2, train, *command, group=False) == [0, 0]

    assert "the best weights, of step 2, are lost" in "".join(capfd.readouterr())
    losses = {line["step"]: line["val_loss"] for line in validations(harmed)}
    assert max(losses, key=losses.get) == 2
    summary = json.loads((harmed / "summary.json").read_text())
    assert summary["model.safetensors"] == "the weights of step 8, the last step"
    product = (harmed / "model.safetensors").read_bytes()
    assert product == (harmed / "checkpoints/step-00000008/model.safetensors").read_bytes()
