"""Under plain torchrun, a stop is one attempt, and the SIGTERM after a death is not a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_run import children
from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.telemetry.events import read_events

ROOT = Path(__file__).parents[2]
TASK = ["--task=slow_task:Slow", "--device=cpu", "--batch.global-size=8", "--batch.micro-size=2",
        "--task.samples=160", "--task.norm=batch", "--data.workers=2", "--world.threads=1",
        "--checkpoint.every=1000"]  # fmt: skip


@contextmanager
def torchrun(run: Path, *arguments: str, size: int = 2, **slow: float
             ) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={size}", "--max-restarts=3", "-m", "trainer", *TASK, *arguments,
               f"--run-dir={run}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    env = {f"SLOW_{name}_S": str(value) for name, value in slow.items()}
    with run.with_suffix(".log").open("ab") as output, subprocess.Popen(
            command, env=os.environ | env | {"PYTHONPATH": path}, stdout=output,
            stderr=output) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                started.terminate()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + 200
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["event"] == name]


def finish(run: Path, *arguments: str, size: int = 2) -> None:
    with torchrun(run, *arguments, size=size) as started:
        assert started.wait(250) == 0, run.with_suffix(".log").read_text()


def tree(pid: int) -> list[int]:
    return [pid, *(found for child in children(pid) for found in tree(child))]


@pytest.mark.long
def test_a_signal_to_one_rank_is_one_attempt_and_all_stop_at_the_same_step(tmp_path: Path) -> None:
    run = tmp_path / "run"

    with torchrun(run, "--steps=1000", TRAIN=0.03) as started:
        wait_for(lambda: len(events(run, "first-step")) == 2)
        os.kill(children(started.pid)[1], signal.SIGUSR1)
        code = started.wait(200)

    assert code == 1
    assert len({e["step"] for e in events(run, "stop")}) == 1
    assert [e["rank"] for e in sorted(events(run, "stop"), key=lambda e: e["rank"])] == [0, 1]
    assert [(a["start_step"], a["end"]) for a in inspect(run)["attempts"]] == [(0, "stopped")]
    assert inspect(run)["step"] == events(run, "stop")[0]["step"]


@pytest.mark.parametrize("faults", [
    ("kill:rank=1:step=8", "slow:rank=0:step=8:seconds=3"),
    pytest.param(("kill:rank=1:phase=start:attempt=0", "slow:phase=start:attempt=0:seconds=5"),
                 marks=pytest.mark.long),
    pytest.param(("kill:rank=1:phase=data:attempt=0", "slow:phase=data:attempt=0:seconds=5"),
                 marks=pytest.mark.long),
])  # fmt: skip
def test_the_signal_after_a_death_is_no_stop(
    tmp_path: Path, faults: tuple[str, ...]
) -> None:
    run = tmp_path / "run"

    finish(run, "--steps=12", *(f"--inject={fault}" for fault in faults))

    assert len(inspect(run)["attempts"]) == 2
    assert events(run, "stop") == []


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("to_all", [True, False])
def test_stops_while_torchrun_and_its_ranks_start_or_train(tmp_path: Path, to_all: bool) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    finish(straight, "--steps=60")

    for after_s in (0.5, 2.0, 4.0, 6.0, 8.0, 10.0):
        with torchrun(run, "--steps=60", TRAIN=0.1) as started:
            wait_for(lambda: len(children(started.pid)) == 2)
            time.sleep(after_s)  # the exact time does not matter
            for pid in tree(started.pid) if to_all else [started.pid]:
                os.kill(pid, signal.SIGTERM)
            stopped_s = time.monotonic()
            assert started.wait(200) != 0
            assert time.monotonic() - stopped_s < 30
    finish(run, "--steps=60")

    assert events(run, "failure") == []
    assert list(differences(straight, run)) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_signal_to_every_process_during_compilation_discards_the_cache(tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", ["--steps=12", "--precision.compile=on"]
    cache = run / "compile-cache"
    interrupted = []

    for after_s in (0.5, 3.0, 6.0):
        with torchrun(run, *arguments) as started:
            known = {mark.stat().st_ctime_ns for mark in cache.glob("*.compiling-*")}
            wait_for(lambda: [m for m in cache.glob("*.compiling-*")
                              if m.stat().st_ctime_ns not in known])  # noqa: B023
            time.sleep(after_s)  # the exact time does not matter
            for pid in tree(started.pid):
                os.kill(pid, signal.SIGTERM)
            assert started.wait(200) != 0
        interrupted.append(bool(list(cache.glob("*.compiling-*"))))
    finish(run, *arguments)

    assert interrupted[0]  # a later signal may come after the compilation
    assert [path.suffix for path in cache.iterdir() if "compiling" in path.name] == []
    assert events(run, "failure") == []
