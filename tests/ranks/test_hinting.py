"""Hints in real runs: a bad run gets each hint once, a good run gets none."""

from __future__ import annotations

from pathlib import Path

from runs import events, until_done

BAD_RUN = ["--task=hinted_task:Hinted", "--device=cpu", "--batch.global-size=8",
        "--batch.micro-size=4", "--steps=240", "--schedule.name=constant", "--schedule.warmup=off",
        "--optim.lr=1e-4", "--task.scale=50", "--task.shuffled", "--task.leaked",
        "--task.dead", "--clip.norm=1"]  # fmt: skip


def hints(folder: Path) -> list[str]:
    return [event["hint"] for event in events(folder, "hint")]


def test_a_bad_run_gets_each_hint_once_also_after_a_restart(ranks, tmp_path, capfd):
    folder = tmp_path / "run"

    until_done(ranks, 1, folder, *BAD_RUN, "--inject=kill:step=150:phase=forward")

    assert sorted(hints(folder)) == ["clipped-steps", "constant-rate", "dead-gradient",
                                     "first-loss", "flat-loss", "shared-samples",
                                     "small-batchnorm"]
    output = capfd.readouterr().out
    for name in hints(folder):
        assert output.count(f"docs/hints.md#{name}; --log.hints-off {name}") == 1
