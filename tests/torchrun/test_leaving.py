"""If the trainer itself ends the run, plain torchrun makes no further attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machine import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("leaving_worker.py")


ONE_ATTEMPT = ["left 0 0 soon", "left 0 1 soon", "started 0 0", "started 0 1"]


@pytest.mark.parametrize(("scenario", "code", "number", "notes"), [
    ("signal", 75, signal.SIGTERM, ONE_ATTEMPT),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("signal", 75, signal.SIGINT, ONE_ATTEMPT),
        ("late", 2, 0, ONE_ATTEMPT),  # ends after torchrun's own signal
        ("alone", 2, 0, ["left 0 1 late", "started 0 0", "started 0 1"])))])
def test_an_end_by_the_trainer_or_a_signal_is_one_attempt(
        tmp_path: Path, scenario: str, code: int, number: int, notes: list[str]) -> None:
    with _torchrun(tmp_path, code, scenario) as torchrun:
        if number:
            _wait_for(tmp_path, ["started 0 0", "started 0 1"])
            torchrun.send_signal(number)
        assert torchrun.wait(200) != 0
    _wait_for(tmp_path, notes)  # after a second signal, torchrun may exit before its ranks


@pytest.mark.long
def test_an_end_of_all_ranks_is_one_attempt_and_a_failure_is_restarted(tmp_path: Path) -> None:
    with _torchrun(tmp_path, 76, "all") as torchrun:
        assert torchrun.wait(200) != 0
    # A rank that is still starting when local rank 0 exits is killed by torchrun's SIGTERM.
    assert {"started 0 0", "left 0 0 soon"} <= set(_notes(tmp_path)) <= set(ONE_ATTEMPT)
    (tmp_path / "notes").unlink()
    with _torchrun(tmp_path, 1, "all", max_restarts=1) as torchrun:
        assert torchrun.wait(200) == 1
    assert {note.split()[1] for note in _notes(tmp_path)} == {"0", "1"}


@contextmanager
def _torchrun(folder: Path, code: int, scenario: str,
              max_restarts: int = 3) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               f"--max-restarts={max_restarts}", f"--master-port={free_port()}",
               str(WORKER), str(folder), str(code), scenario]
    with (folder / "output").open("wb") as output, subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=output,
            stderr=output) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()


def _notes(folder: Path) -> list[str]:
    path = folder / "notes"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def _wait_for(folder: Path, notes: list[str]) -> None:
    deadline = time.monotonic() + 200
    while _notes(folder) != sorted(notes):
        assert time.monotonic() < deadline, _notes(folder)
        time.sleep(0.02)
