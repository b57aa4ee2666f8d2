"""A hung rank or loader worker is detected, named and killed; the bits stay the same."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch
from runs import TAPE

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.resilience.fault_injection import PHASES

LIMIT_S = 2.0
FLAGS = (*TAPE, "--task.validation=6", "--task.norm=batch", "--steps=40", "--eval.every=8",
         "--checkpoint.every=5")

Places = tuple[tuple[str, int, int | None], ...]
"""Phase, rank and step of each fault."""
HANGS: tuple[Places, Places] = (
    (("start", 1, None), ("data", 0, 3), ("evaluate", 1, 8)),
    (("save-mid", 0, 15), ("step-end", 1, 22), ("forward", 0, 28)))
STOPS: tuple[Places, Places] = (
    (("backward", 0, 4), ("restore", 1, None), ("save-begin", 0, 10)),
    (("optimizer", 1, 17), ("save-end", 0, 25), ("evaluate", 0, 32)))


def start(run: Path, *arguments: str, task: str = "tape_task:Tape", limit: float = LIMIT_S,
          **options: Any) -> Launch:
    return Launch(run, *FLAGS, f"--task={task}", f"--watchdog.limit-s={limit:g}", *arguments,
                  **options).start()


def faults(kind: str, places: Places) -> list[str]:
    return [f"--inject={kind}:rank={rank}:phase={phase}" + ("" if step is None else f":step={step}")
            for phase, rank, step in places]


def everywhere(rank: int) -> Places:
    """All phases of a rank. Rank 0 writes; meanwhile its main thread continues for five steps."""
    saves: Places = (("save-begin", 0, 10), ("save-mid", 0, 20), ("save-end", 0, 30))
    return (("start", rank, None), ("data", rank, 1), ("forward", rank, 4), ("restore", rank, None),
            ("evaluate", rank, 8), ("optimizer", rank, 17), ("backward", rank, 19),
            ("data", rank, 27), ("step-end", rank, 28), *(saves if rank == 0 else ()))


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launch]]:
    """Concurrent launches, which mostly wait."""
    folder = tmp_path_factory.mktemp("hangs")
    for name in ("loader", "busy"):
        (folder / name).mkdir()
    found = {
        "straight": start(folder / "straight.run"),
        **{f"{kind} {number}": start(folder / f"{kind}-{number}.run", *faults(kind, places))
           for kind, both in (("hang", HANGS), ("stop", STOPS))
           for number, places in enumerate(both)},
        "loader": start(folder / "loader.run", "--data.workers=2", "--task.endless=50",
                        "--task.stops=120", f"--task.marks={folder / 'loader'}",
                        task="failing_task:Failing"),
        # Rank 1 must die while rank 0 is computing; the limit is longer than that computation.
        "busy": start(folder / "busy.run", "--task.busy-at=34", f"--task.marks={folder / 'busy'}",
                      "--inject=slow:rank=1:step=15:phase=forward:seconds=8",
                      "--inject=kill:rank=1:step=15:phase=forward", task="failing_task:Failing",
                      limit=20),
        "stopped survivor": start(
            folder / "survivor.run", "--inject=stop:rank=0:step=13:phase=forward",
            "--inject=slow:rank=1:step=13:phase=forward",
            "--inject=kill:rank=1:step=13:phase=backward", limit=30),
        "alone": start(folder / "alone.run", "--inject=hang:step=12:phase=backward", size=1),
        "straight alone": start(folder / "straight-alone.run", size=1),
    }
    yield found
    for each in found.values():
        each.kill()


def check_same_bits(straight: Launch, disturbed: Launch) -> None:
    straight.end()
    assert list(differences(straight.run, disturbed.run)) == []


def check_found_in_time(launch: Launch, places: Places) -> list[tuple[dict, dict]]:
    """Each fault with its hang event, after checking that it was detected and restarted within
    three times the limit plus a margin for a busy machine. Collectives would wait for a minute."""
    output = launch.end()
    faults, hangs = launch.events("fault"), launch.events("hang")
    assert [f["attempt"] for f in faults] == [h["attempt"] for h in hangs], output
    assert len(faults) == len(places)
    starts = {e["attempt"]: e["time"] for e in launch.events("start")}
    for fault, hang in zip(faults, hangs, strict=True):
        assert hang["culprit"] == fault["rank"], output
        assert hang["time"] - fault["time"] < 3 * LIMIT_S + 15, output
        assert starts.get(fault["attempt"] + 1, math.inf) - hang["time"] < 20, output
        assert f"error: hang: rank {fault['rank']} " in output
    return list(zip(faults, hangs, strict=True))


def stacks(launch: Launch, attempt: int, rank: int) -> str:
    return (launch.run / f"stacks/attempt-{attempt}-rank-{rank}.txt").read_text()


def test_all_phases_are_covered() -> None:
    assert {phase for places in HANGS + STOPS for phase, _, _ in places} == set(PHASES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_a_hung_or_stopped_rank_is_named_and_killed_in_each_phase(
    launches: dict[str, Launch], kind: str, number: int
) -> None:
    launch = launches[f"{kind} {number}"]

    found = check_found_in_time(launch, (HANGS if kind == "hang" else STOPS)[number])

    for fault, hang in found:
        own, other = (stacks(launch, fault["attempt"], rank)
                      for rank in (fault["rank"], 1 - fault["rank"]))
        if kind == "hang":
            assert (hang["at_phase"] or hang["saving"]) == fault["at_phase"]
            assert hang["at_step"] == fault["at_step"]
            assert "fault_injection.py" in own
            assert "Thread MainThread" in own
            assert "waits for other ranks" in other
        else:
            assert hang["why"] == "is stopped"
            if fault["at_phase"].startswith("save-"):  # other threads run on for a moment
                assert hang["saving"].startswith("save-")
            else:
                assert (hang["at_phase"], hang["at_step"]) == (fault["at_phase"], fault["at_step"])
            assert "State:\tT (stopped)" in own
            assert "Thread MainThread" in other
    check_same_bits(launches["straight"], launch)


@pytest.mark.timeout(600)
def test_a_stuck_or_stopped_loader_worker_is_named(launches: dict[str, Launch]) -> None:
    launch = launches["loader"]
    launch.end()

    hangs = launch.events("hang")

    why = sorted(hang["why"].rpartition(" ")[2] for hang in hangs)
    assert why == ["reading", "stopped"]
    for hang in hangs:
        assert hang["at_phase"] == "data"
        assert "its loader " in hang["why"]
        expected = "failing_task.py" if hang["why"].endswith("reading") else "State:\tT (stopped)"
        assert expected in stacks(launch, hang["attempt"], hang["culprit"])
    check_same_bits(launches["straight"], launch)


@pytest.mark.timeout(600)
def test_a_survivor_saves_and_exits_during_a_long_computation(launches: dict[str, Launch]) -> None:
    launch = launches["busy"]
    output = launch.end()

    _, death = launch.events("fault")
    assert launch.events("hang") == []
    assert "leaving in place of the main thread" in output
    assert max(e["time"] for e in launch.events("start")) - death["time"] < 20
    assert inspect(launch.run)["attempts"][1]["start_step"] >= death["at_step"] - 1
    check_same_bits(launches["straight"], launch)


@pytest.mark.timeout(600)
def test_a_survivor_that_is_stopped_is_continued_to_save(launches: dict[str, Launch]) -> None:
    launch = launches["stopped survivor"]
    launch.end()

    _, _, death = launch.events("fault")
    assert max(e["time"] for e in launch.events("start")) - death["time"] < 20
    assert inspect(launch.run)["attempts"][1]["start_step"] == 12
    check_same_bits(launches["straight"], launch)


@pytest.mark.timeout(600)
def test_a_hung_single_rank_saves_its_last_step_boundary(launches: dict[str, Launch]) -> None:
    launch = launches["alone"]
    launch.end()

    [hang] = launch.events("hang")
    assert (hang["culprit"], hang["at_phase"], hang["at_step"]) == (0, "backward", 12)
    assert inspect(launch.run)["attempts"][1]["start_step"] == 11
    check_same_bits(launches["straight alone"], launch)  # with the buffers from before the forward


def test_a_process_continued_after_sigstop_during_a_save_is_no_hang(tmp_path: Path) -> None:
    # Like a suspended machine: stopped for longer than a save may make no progress.
    injected = ["stop:step=4:phase=save-mid", "slow:step=4:phase=save-mid:seconds=1"]
    with start(tmp_path / "run", "--steps=5", "--checkpoint.every=4",
               *(f"--inject={fault}" for fault in injected), limit=1, by="") as launch:
        pid = launch.process.pid
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)

        launch.end()

    assert [e["fault"] for e in launch.events("fault")] == injected


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "places", "by"), [
    *((kind, everywhere(rank), "launch") for kind in ("hang", "stop") for rank in (0, 1)),
    ("stop", (("forward", 0, 12), ("backward", 1, 20)), "torchrun")])
def test_hangs_and_stops_of_either_rank_in_each_phase_and_under_torchrun(
    tmp_path: Path, kind: str, places: Places, by: str
) -> None:
    with start(tmp_path / "run", *faults(kind, places), by=by) as launch, start(
            tmp_path / "straight") as straight:
        check_found_in_time(launch, places)

        check_same_bits(straight, launch)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_long_first_forward_and_a_long_validation_are_no_hang(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with start(tmp_path / "run", "--task.first-s=30", "--task.validation-s=5", "--steps=12",
               "--eval.every=6", task="failing_task:Failing", limit=3) as launch:
        launch.end()

    assert time.monotonic() - began_s > 40
    assert launch.events("hang") == []
    assert {event["attempt"] for event in launch.events("start")} == {0}
