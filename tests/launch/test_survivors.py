"""After a rank's death the survivors save the last step boundary: at most one step is repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

ROOT = Path(__file__).parents[2]
PHASES = ("stop", "rendezvous", "fork", "start", "join", "build", "warm-up", "restore", "train")
"""Phases of a restart, from the exit of a rank to the first step."""


def launch(size: int, run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", f"--nproc-per-node={size}", "--max-restarts=9", "--",
               "--task=tape_task:Tape", "--device=cpu", "--batch.global-size=8",
               "--batch.micro-size=2", "--task.samples=160", "--task.norm=batch",
               "--data.workers=0", "--checkpoint.every=1000", f"--run-dir={run}", *arguments]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    return subprocess.run(command, capture_output=True, text=True, timeout=250,
                          env=os.environ | {"PYTHONPATH": path})


@pytest.mark.parametrize(("size", "sync_bn"), [
    (3, "off"),
    *(pytest.param(*other, marks=pytest.mark.long)
      for other in [(2, "auto"), (2, "off"), (3, "auto"), (4, "auto"), (4, "off")]),
])
def test_the_next_attempt_starts_from_the_last_boundary(tmp_path, size, sync_bn):
    arguments = ["--steps=40", f"--parallel.sync-bn={sync_bn}", "--task.dropout=0.2"]
    deaths = [(5, 0, "backward"), (12, size - 1, "forward"), (19, 1, "optimizer"),
              (20, 0, "step-end"), (31, size - 1, "backward")]  # fmt: skip
    faults = [f"--inject=kill:step={s}:rank={r}:phase={p}" for s, r, p in deaths]

    straight = launch(size, tmp_path / "straight", *arguments)
    killed = launch(size, tmp_path / "killed", *arguments, *faults)

    assert straight.returncode == 0, straight.stderr
    assert killed.returncode == 0, killed.stderr
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))
    starts = [attempt["start_step"] for attempt in inspect(tmp_path / "killed")["attempts"]]
    assert len(starts) == len(deaths) + 1
    for start, (step, _, _) in zip(starts[1:], deaths, strict=True):
        assert start in (step - 1, step)
    events = [json.loads(t) for t in (tmp_path / "killed/events.jsonl").read_text().splitlines()]
    waits = []
    for step, rank, _ in deaths:
        fault = next(e for e in events if e["event"] == "fault" and e["at_step"] == step)
        reports = [e for e in events
                   if e["event"] == "lost-peer" and e["attempt"] == fault["attempt"]]
        assert len(reports) == size - 1, f"rank {rank} at step {step}"
        waits += [e["time"] - fault["time"] for e in reports]
    # Normally 0.1 s. Collectives time out after a minute, the grace time after half of one.
    assert max(waits) < 20
    begun = [e["entered"] for e in events if e["event"] == "first-step" and e["rank"] == 0]
    assert {tuple(phases) for phases in begun[1:]} == {PHASES}
    assert all(list(phases.values()) == sorted(phases.values()) for phases in begun)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_save_that_exceeds_the_launchers_grace_time_is_not_begun(tmp_path):
    arguments = ["--steps=40", "--checkpoint.every=20", "--watchdog.limit-s=100"]
    # The save of step 20 takes 40 s, and step 25 waits for it; a death in step 30 loses 10 steps.
    faults = ["--inject=slow:phase=save-mid:step=20:seconds=40", "--inject=slow:step=25:seconds=45",
              "--inject=kill:rank=1:step=30"]

    straight = launch(2, tmp_path / "straight", *arguments)
    killed = launch(2, tmp_path / "killed", *arguments, *faults)

    assert (straight.returncode, killed.returncode) == (0, 0), killed.stderr
    why = "step 29 is not saved: by the speed of the last save this would take 40 s"
    assert why in killed.stderr
    assert [a["start_step"] for a in inspect(tmp_path / "killed")["attempts"]] == [0, 20]
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))
