"""A stop whose time is over amid a step: the boundary before it is saved all the same."""

from __future__ import annotations

import json

import pytest
from runs import train

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.norm=batch", "--task.samples=160", "--task.dropout=0.2",
        "--steps=12", "--checkpoint.every=1000"]  # fmt: skip


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_step_that_outlasts_the_grace_is_left_and_its_boundary_saved(ranks, tmp_path, size):
    late = ["--stop.grace-s=1", "--inject=term:step=7", "--inject=slow:step=7:seconds=600"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert ranks(size, train, *TASK, f"--run-dir={straight}", group=False) == [0] * size

    ended = ranks.outcomes(size, train, *TASK, *late, f"--run-dir={stopped}", group=False)

    assert ended[0].exit_code == 75
    events = [json.loads(t) for t in (stopped / "events.jsonl").read_text().splitlines()]
    saves = [e["at_step"] for e in events if e["event"] == "save"]
    assert saves == [6]
    assert ranks(size, train, *TASK, *late, f"--run-dir={stopped}", group=False) == [0] * size
    assert not list(differences(straight, stopped))
