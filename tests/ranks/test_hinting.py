"""Hints in real runs: a bad run gets each hint once, a good run gets none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import train

BAD_RUN = ["--task=hinted_task:Hinted", "--device=cpu", "--batch.global-size=8",
        "--batch.micro-size=4", "--steps=240", "--schedule.name=constant", "--schedule.warmup=off",
        "--optim.lr=1e-4", "--task.scale=50", "--task.shuffled", "--task.leaked",
        "--task.dead", "--clip.norm=1"]  # fmt: skip


def hints(run: Path) -> list[str]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["hint"] for event in events if event["event"] == "hint"]


def test_a_bad_run_gets_each_hint_once_also_after_a_restart(ranks, tmp_path, capfd):
    run = tmp_path / "run"
    fault = "--inject=kill:step=150:phase=forward"
    outcome, = ranks.outcomes(1, train, *BAD_RUN, fault, f"--run-dir={run}", group=False)
    assert outcome.signal == 9

    assert ranks(1, train, *BAD_RUN, fault, f"--run-dir={run}", group=False) == [0]

    assert sorted(hints(run)) == ["clipped-steps", "constant-rate", "dead-gradient", "first-loss",
                                  "flat-loss", "shared-samples", "small-batchnorm"]
    output = outcome.output + capfd.readouterr().out
    for name in hints(run):
        assert output.count(f"docs/hints.md#{name}; --log.hints-off {name}") == 1


def test_hints_that_are_off_are_not_given(ranks, tmp_path):
    off = ["small-batchnorm", "shared-samples", "first-loss", "constant-rate"]

    assert ranks(1, train, *BAD_RUN, "--steps=60", *[f"--log.hints-off={name}" for name in off],
                 f"--run-dir={tmp_path / 'run'}", group=False) == [0]

    assert hints(tmp_path / "run") == []


def test_a_very_high_learning_rate_gets_a_hint(ranks, tmp_path):
    assert ranks(1, train, "spiral", "--device=cpu", "--optim.lr=3", "--epochs=20",
                 "--checkpoint.every=off", "--eval.every=off",
                 f"--run-dir={tmp_path / 'run'}", group=False) == [0]

    assert {"clipped-steps", "flat-loss"} & set(hints(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", ["sample", "spiral", "shapes", "shape-labels", "text",
                                    "text-stream"])
def test_a_shipped_recipe_gets_no_hint(ranks, tmp_path, recipe):
    assert ranks(1, train, recipe, "--device=cpu", f"--run-dir={tmp_path / 'run'}", group=False,
                 timeout_s=1400) == [0]

    assert hints(tmp_path / "run") == []
