"""The last step is saved before its validation and again after it; otherwise the bits differ."""

from __future__ import annotations

import pytest
from runs import train, validations

from trainer.commands.compare import differences

RUN = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--steps=9",
       "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=40",
       "--task.validation=6", "--eval.every=4", "--checkpoint.every=4",
       "--task.norm=batch", "--task.dropout=0.3"]  # fmt: skip


@pytest.mark.parametrize("step", [8, 9])
def test_a_stop_at_a_step_with_a_due_validation_changes_nothing(ranks, tmp_path, step):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert ranks(2, train, *RUN, f"--run-dir={straight}", group=False) == [0, 0]
    again = [*RUN, f"--inject=term:step={step}:rank=1", f"--run-dir={stopped}"]

    assert ranks(2, train, *again, group=False) == [75, 75]
    assert ranks(2, train, *again, group=False) == [0, 0]

    assert list(differences(straight, stopped)) == []
    assert validations(stopped) == validations(straight)
