"""The launcher gives up on a repeated failure, and its last line names the first cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import Launch
from runs import TAPE

from trainer.commands.inspect import inspect

RAISED = "ValueError: sample 88 is not to be borne (tests/support/failing_task.py:"
FLAGS = (*TAPE, "--task=failing_task:Failing", "--steps=20", "--data.shuffle=off",
         "--checkpoint.every=5", "--log.level=warning")
RAISES = ("--task.how=raise", "--task.at=92")


def end(run: Path, *arguments: str, code: int, **options: Any) -> list[str]:
    """The lines that a launch has printed, which ends with `code`."""
    options = {"options": ["--max-restarts=3"], **options}
    with Launch(run, *FLAGS, *arguments, **options).start() as launch:
        return launch.end(code).strip().splitlines()


def ends(run: Path) -> list[str]:
    return [attempt["end"] for attempt in inspect(run)["attempts"]]


def test_a_crash_at_the_same_step_is_tried_three_times(tmp_path: Path) -> None:
    run = tmp_path / "run"

    lines = end(run, *RAISES, code=76)

    assert ends(run) == ["failure", "failure", "failure", "gave up"]
    assert lines[-1].startswith("error: gave up: step 12 has failed 3 times in a row")
    assert f"First cause: rank 1, step 12 (forward), attempt 0: {RAISED}" in lines[-1]
    restarts = [line for line in lines if line.startswith("launch: ")]
    assert len(restarts) == 3
    for number, line in enumerate(restarts):
        assert line.startswith("launch: failed first: rank 1, step 12 (")
        assert f"attempt {number}: {RAISED}" in line

    # Repeating the command allows the same number of attempts again.
    *_, last = end(run, *RAISES, code=1, options=["--max-restarts=0"])

    assert last.startswith("launch: failed first: rank 1, step 12 (warm-up, forward), attempt 4: "
                           f"{RAISED}")
    assert last.endswith("; giving up, 0 of 0 restarts used")


def test_a_single_rank_killed_repeatedly_at_the_same_step_is_given_up(tmp_path: Path) -> None:
    *_, last = end(tmp_path / "run", "--task.how=kill", code=76, size=1)

    assert last.endswith("First cause: rank 0, step 12 (train), attempt 0: was killed by SIGKILL")


def test_a_failed_import_is_not_restarted(tmp_path: Path) -> None:
    *_, last = end(tmp_path / "run", "--task.how=import", "--task.at=92", code=2)

    assert ends(tmp_path / "run") == ["failure"]
    assert last.startswith("launch: failed first: rank 1, step 12 (forward), attempt 0: "
                           "ModuleNotFoundError: No module named 'no_such_module_anywhere' (")
    assert last.endswith("; not restarted, would fail again")


@pytest.mark.long
def test_under_torchrun_the_last_line_names_the_first_cause_too(tmp_path: Path) -> None:
    *_, last = end(tmp_path / "run", *RAISES, "--restart.max-same-step=1", code=1, by="torchrun")

    assert ends(tmp_path / "run") == ["failure", "gave up"]
    assert last.startswith("trainer: exit code 76: gave up: step 12 has failed 1 time in a")
    assert f"First cause: rank 1, step 12 (forward), attempt 0: {RAISED}" in last
