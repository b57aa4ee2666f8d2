"""A hung rank or loader worker is detected, named and killed; the bits stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.resilience.fault_injection import PHASES
from trainer.telemetry.events import read_events

ROOT = Path(__file__).parents[2]
LIMIT_S = 2.0
STEPS, EVAL_EVERY, SAVE_EVERY = 40, 8, 5

HANGS = (("start", 1, None), ("data", 0, 3), ("evaluate", 1, 8), ("save-mid", 0, 15),
         ("step-end", 1, 22), ("forward", 0, 28))  # fmt: skip
STOPS = (("backward", 0, 4), ("restore", 1, None), ("save-begin", 0, 10), ("optimizer", 1, 17),
         ("save-end", 0, 25), ("evaluate", 0, 32))  # fmt: skip
"""Phase, rank and step."""


class Run:
    """A running launch, and its run folder."""

    def __init__(
        self, folder: Path, *arguments: str, size: int = 2, task: str = "tape_task:Tape",
        limit: str = f"{LIMIT_S:g}", torchrun: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = ["launch", f"--nproc-per-node={size}", "--max-restarts=20", "--"]
        if torchrun:
            command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={size}",
                       "--max-restarts=20", "-m", "trainer"]  # fmt: skip
        values = {
            "task": task, "device": "cpu", "batch.global-size": 8, "batch.micro-size": 2,
            "task.samples": 160, "task.validation": 6, "task.norm": "batch", "data.workers": 0,
            "steps": STEPS, "eval.every": EVAL_EVERY, "checkpoint.every": SAVE_EVERY,
            "world.threads": 1, "watchdog.limit-s": limit, "run-dir": folder,
        }  # fmt: skip
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command, *(f"--{k}={v}" for k, v in values.items()),
                 *arguments],
                stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip

    def end(self, timeout_s: float = 400.0) -> str:
        """Wait until it exits with 0; returns its output."""
        code = self.process.wait(timeout_s)
        output = self.log.read_text()
        assert code == 0, output
        return output

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.folder / "events.jsonl") if e["event"] == name]

    def stacks(self, attempt: int, rank: int) -> str:
        return (self.folder / f"stacks/attempt-{attempt}-rank-{rank}.txt").read_text()


def faults(kind: str, places: tuple[tuple[str, int, int | None], ...]) -> list[str]:
    return [f"--inject={kind}:rank={rank}:phase={phase}" + ("" if step is None else f":step={step}")
            for phase, rank, step in places]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Concurrent launches, which mostly wait."""
    folder = tmp_path_factory.mktemp("hangs")
    for name in ("marks", "loader", "busy"):
        (folder / name).mkdir()
    found = {
        "straight": Run(folder / "straight.run"),
        "hang 1": Run(folder / "hang-1.run", *faults("hang", HANGS[:3])),
        "hang 2": Run(folder / "hang-2.run", *faults("hang", HANGS[3:])),
        "stop 1": Run(folder / "stop-1.run", *faults("stop", STOPS[:3])),
        "stop 2": Run(folder / "stop-2.run", *faults("stop", STOPS[3:])),
        "loader": Run(folder / "loader.run", "--data.workers=2", "--task.endless=50",
                      "--task.stops=120", f"--task.marks={folder / 'loader'}",
                      task="stuck_task:Stuck"),
        # Rank 1 must die while rank 0 is computing; the limit is longer than that computation.
        "busy": Run(folder / "busy.run", "--task.busy-at=31", f"--task.marks={folder / 'busy'}",
                    "--inject=slow:rank=1:step=15:phase=forward:seconds=8",
                    "--inject=kill:rank=1:step=15:phase=forward", task="stuck_task:Stuck",
                    limit="20"),
        "alone": Run(folder / "alone.run", "--inject=hang:step=12:phase=backward", size=1),
        "straight alone": Run(folder / "straight-alone.run", size=1),
    }  # fmt: skip
    yield found
    for run in found.values():
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def test_all_phases_are_covered() -> None:
    assert {phase for phase, _, _ in HANGS + STOPS} == set(PHASES)


def found_in_time(run: Run, output: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each fault with its hang event, after checking that it was detected and restarted in time.

    In time: within three times the limit plus a margin for a busy machine. Collectives would wait
    for a minute.
    """
    faults, hangs = run.events("fault"), run.events("hang")
    assert [f["attempt"] for f in faults] == [h["attempt"] for h in hangs], output
    starts = {e["attempt"]: e["time"] for e in run.events("start")}
    for fault, hang in zip(faults, hangs, strict=True):
        assert hang["culprit"] == fault["rank"], output
        assert hang["time"] - fault["time"] < 3 * LIMIT_S + 15, output
        assert starts[fault["attempt"] + 1] - hang["time"] < 20, output
        assert f"error: hang: rank {fault['rank']} " in output
    return list(zip(faults, hangs, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "places"), [("hang 1", HANGS[:3]), ("hang 2", HANGS[3:])])
def test_a_hung_rank_is_named_and_killed_in_each_phase(
    runs: dict[str, Run], name: str, places: tuple[tuple[str, int, int | None], ...]
) -> None:
    run = runs[name]
    output = run.end()

    found = found_in_time(run, output)

    assert len(found) == len(places)
    for fault, hang in found:
        assert (hang["at_phase"] or hang["saving"]) == fault["at_phase"]
        assert hang["at_step"] == fault["at_step"]
        stacks = run.stacks(fault["attempt"], fault["rank"])
        assert "fault_injection.py" in stacks
        assert "Thread MainThread" in stacks
        assert "waits for other ranks" in run.stacks(fault["attempt"], 1 - fault["rank"])
    runs["straight"].end()
    assert list(differences(runs["straight"].folder, run.folder)) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "places"), [("stop 1", STOPS[:3]), ("stop 2", STOPS[3:])])
def test_a_stopped_rank_is_named_and_killed_in_each_phase(
    runs: dict[str, Run], name: str, places: tuple[tuple[str, int, int | None], ...]
) -> None:
    run = runs[name]
    output = run.end()

    found = found_in_time(run, output)

    assert len(found) == len(places)
    for fault, hang in found:
        assert hang["why"] == "is stopped"
        if fault["at_phase"].startswith("save-"):  # other threads run on for a moment
            assert hang["saving"].startswith("save-")
        else:
            assert (hang["at_phase"], hang["at_step"]) == (fault["at_phase"], fault["at_step"])
        assert "State:\tT (stopped)" in run.stacks(fault["attempt"], fault["rank"])
        assert "Thread MainThread" in run.stacks(fault["attempt"], 1 - fault["rank"])
    runs["straight"].end()
    assert list(differences(runs["straight"].folder, run.folder)) == []


@pytest.mark.timeout(600)
def test_a_stuck_or_stopped_loader_worker_is_named(runs: dict[str, Run]) -> None:
    run = runs["loader"]
    run.end()

    hangs = run.events("hang")

    why = sorted(hang["why"].rpartition(" ")[2] for hang in hangs)
    assert why == ["reading", "stopped"]
    for hang in hangs:
        assert hang["at_phase"] == "data"
        assert "its loader " in hang["why"]
        stacks = run.stacks(hang["attempt"], hang["culprit"])
        expected = "stuck_task.py" if hang["why"].endswith("reading") else "State:\tT (stopped)"
        assert expected in stacks
    runs["straight"].end()
    assert list(differences(runs["straight"].folder, run.folder)) == []


@pytest.mark.timeout(600)
def test_a_survivor_saves_and_exits_during_a_long_computation(runs: dict[str, Run]) -> None:
    run = runs["busy"]
    output = run.end()

    _, death = run.events("fault")
    starts = run.events("start")
    assert run.events("hang") == []
    assert "leaving in place of the main thread" in output
    assert max(e["time"] for e in starts) - death["time"] < 20
    assert inspect(run.folder)["attempts"][1]["start_step"] >= death["at_step"] - 1
    runs["straight"].end()
    assert list(differences(runs["straight"].folder, run.folder)) == []


@pytest.mark.timeout(600)
def test_a_hung_single_rank_saves_its_last_step_boundary(runs: dict[str, Run]) -> None:
    run = runs["alone"]
    run.end()

    [hang] = run.events("hang")
    assert (hang["culprit"], hang["at_phase"], hang["at_step"]) == (0, "backward", 12)
    assert inspect(run.folder)["attempts"][1]["start_step"] == 11
    runs["straight alone"].end()  # so the save has the buffers from before the forward
    assert list(differences(runs["straight alone"].folder, run.folder)) == []


def test_a_process_continued_after_sigstop_during_a_save_is_no_hang(tmp_path: Path) -> None:
    # Like a suspended machine: stopped for longer than a save may make no progress.
    command = [sys.executable, "-m", "trainer", "--task=tape_task:Tape", "--device=cpu",
               "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=160", "--steps=5",
               "--data.workers=0", "--world.threads=1", "--watchdog.limit-s=1",
               "--checkpoint.every=4", "--inject=stop:step=4:phase=save-mid",
               "--inject=slow:step=4:phase=save-mid:seconds=1",
               f"--run-dir={tmp_path / 'run'}"]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)

        assert process.wait(200) == 0
        injected = [e["fault"] for e in read_events(tmp_path / "run/events.jsonl")
                    if e["event"] == "fault"]
        assert injected == ["stop:step=4:phase=save-mid", "slow:step=4:phase=save-mid:seconds=1"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_hangs_and_stops_of_either_rank_in_each_phase(tmp_path: Path, kind: str, rank: int) -> None:
    places: list[tuple[str, int, int | None]] = [
        ("start", rank, None), ("data", rank, 1), ("forward", rank, 4), ("restore", rank, None),
        ("evaluate", rank, 8), ("optimizer", rank, 17), ("backward", rank, 19),
        ("data", rank, 27), ("step-end", rank, 28),
    ]  # fmt: skip
    if rank == 0:  # the writer; meanwhile its main thread continues for five steps
        places += [("save-begin", 0, 10), ("save-mid", 0, 20), ("save-end", 0, 30)]
    straight = Run(tmp_path / "straight.run")
    run = Run(tmp_path / "disturbed.run", *faults(kind, tuple(places)))

    output = run.end(600)

    assert len(found_in_time(run, output)) == len(places)
    straight.end()
    assert list(differences(straight.folder, run.folder)) == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_under_torchrun_a_stopped_rank_does_not_delay_the_restart(tmp_path: Path) -> None:
    places = (("forward", 0, 12), ("backward", 1, 20))
    straight = Run(tmp_path / "straight.run")
    run = Run(tmp_path / "stopped.run", *faults("stop", places), torchrun=True)

    output = run.end(280)

    assert len(found_in_time(run, output)) == len(places)
    straight.end()
    assert list(differences(straight.folder, run.folder)) == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_long_first_forward_and_a_long_validation_are_no_hang(tmp_path: Path) -> None:
    began_s = time.monotonic()
    run = Run(tmp_path / "run", "--task.first-s=60", "--task.validation-s=10", "--steps=12",
              "--eval.every=6", task="stuck_task:Stuck", limit="6")  # fmt: skip

    run.end(380)

    assert time.monotonic() - began_s > 80
    assert run.events("hang") == []
    assert {event["attempt"] for event in run.events("start")} == {0}
