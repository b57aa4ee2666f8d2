"""The launcher gives up on a repeated failure, and its last line names the first cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.commands.inspect import inspect

ROOT = Path(__file__).parents[2]
RAISED = "ValueError: sample 88 is not to be borne (tests/support/failing_task.py:"


def launch(run: Path, *arguments: str, command: tuple[str, ...]) -> tuple[int, list[str]]:
    """The exit code and the lines on stderr."""
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    ended = subprocess.run(
        [sys.executable, "-m", *command, str(run), "--task=failing_task:Failing", "--device=cpu",
         "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=160", "--steps=20",
         "--data.shuffle=off", "--data.workers=0", "--checkpoint.every=5", "--world.threads=1",
         "--log.level=warning", *arguments],
        capture_output=True, text=True, timeout=250, cwd=ROOT, check=False,
        env=os.environ | {"PYTHONPATH": search},
    )  # fmt: skip
    return ended.returncode, ended.stderr.strip().splitlines()


def hot(size: int, max_restarts: int = 3) -> tuple[str, ...]:
    return ("launch", f"--nproc-per-node={size}", f"--max-restarts={max_restarts}", "--",
            "--run-dir")


def ends(run: Path) -> list[str]:
    return [attempt["end"] for attempt in inspect(run)["attempts"]]


def test_a_crash_at_the_same_step_is_tried_three_times(tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", ["--task.how=raise", "--task.at=92"]

    code, lines = launch(run, *arguments, command=hot(2))

    assert code == 76
    assert ends(run) == ["failure", "failure", "failure", "gave up"]
    assert lines[-1].startswith("error: gave up: step 12 has failed 3 times in a row")
    assert f"First cause: rank 1, step 12 (forward), attempt 0: {RAISED}" in lines[-1]
    restarts = [line for line in lines if line.startswith("launch: ")]
    assert len(restarts) == 3
    for number, line in enumerate(restarts):
        assert line.startswith("launch: failed first: rank 1, step 12 (")
        assert f"attempt {number}: {RAISED}" in line

    # Repeating the command allows the same number of attempts again.
    code, lines = launch(run, *arguments, command=hot(2, max_restarts=0))

    assert code == 1
    assert lines[-1].startswith("launch: failed first: rank 1, step 12 (warm-up, forward), attempt "
                                f"4: {RAISED}")
    assert lines[-1].endswith("; giving up, 0 of 0 restarts used")


def test_a_single_rank_killed_repeatedly_at_the_same_step_is_given_up(tmp_path: Path) -> None:
    code, lines = launch(tmp_path / "run", "--task.how=kill", command=hot(1))

    assert code == 76
    assert lines[-1].endswith("First cause: rank 0, step 12 (train), attempt 0: was killed by "
                              "SIGKILL")


def test_a_failed_import_is_not_restarted(tmp_path: Path) -> None:
    code, lines = launch(tmp_path / "run", "--task.how=import", "--task.at=92", command=hot(2))

    assert code == 2
    assert ends(tmp_path / "run") == ["failure"]
    assert lines[-1].startswith("launch: failed first: rank 1, step 12 (forward), attempt 0: "
                                "ModuleNotFoundError: No module named 'no_such_module_anywhere' (")
    assert lines[-1].endswith("; not restarted, would fail again")


@pytest.mark.long
def test_under_torchrun_the_last_line_names_the_first_cause_too(tmp_path: Path) -> None:
    command = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3",
               "-m", "trainer", "--run-dir")  # fmt: skip

    _, lines = launch(tmp_path / "run", "--task.how=raise", "--task.at=92",
                      "--restart.max-same-step=1", command=command)

    assert ends(tmp_path / "run") == ["failure", "gave up"]
    assert lines[-1].startswith("trainer: exit code 76: gave up: step 12 has failed 1 time in a")
    assert f"First cause: rank 1, step 12 (forward), attempt 0: {RAISED}" in lines[-1]
