"""When a rank dies, the launcher restarts all ranks or prints why it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import machine
import pytest
from launching import HERE, ROOT, Launched
from machine import AT_ONCE_S, alive, wait_gone

GRACE_S = 0.3


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A finished launch with three failures of different kinds."""
    script = {
        "0.0": "follow=1", "0.1": f"die={signal.SIGKILL:d}", "0.2": "follow=1",
        "1.0": "serve=2", "1.1": "stubborn", "1.2": "exit=3",
        "2.0": "fail", "2.1": "follow=1", "2.2": "follow=1",
    }
    folder = tmp_path_factory.mktemp("launch") / "run"
    with Launched(folder, script, f"--grace-s={GRACE_S}", num_ranks=3) as launch:
        launch.end()
        yield launch


def test_all_ranks_are_restarted_after_a_failure_of_any_kind(restarted: Launched) -> None:
    assert restarted.end() == 0

    started = restarted.notes("started")
    assert sorted((note["attempt"], note["rank"]) for note in started) == [
        (attempt, rank) for attempt in range(4) for rank in range(3)]
    assert wait_gone(restarted.pids(), AT_ONCE_S) == set()  # including the child of a killed rank
    lines = [line for line in restarted.err.splitlines() if line.startswith("launch: ")]

    causes = ("1 was killed by SIGKILL", "2 exited with code 3", "0 exited with code 1")
    for number, (line, cause) in enumerate(zip(lines, causes, strict=True), start=1):
        assert line.startswith(f"launch: rank {cause}; restart {number} of 3, ")


def test_ranks_that_wait_are_informed_and_get_sigterm_only_after_the_grace_time(
    restarted: Launched,
) -> None:
    # Other survivors may get one too, if they take longer than that to exit by themselves.
    signalled = {(note["attempt"], note["rank"]) for note in restarted.notes("sigterm")}
    assert {(1, 0), (1, 1)} <= signalled <= {(n, rank) for n in range(3) for rank in range(3)}

    for note in restarted.notes("sigterm"):
        began_s = max(n["time_s"] for n in restarted.notes("started", attempt=note["attempt"]))
        assert note["time_s"] - began_s >= GRACE_S
    received = {(n["rank"], n["received"]) for n in restarted.notes("sigterm", attempt=1)}
    assert received == {(0, "absent\n"), (1, "absent\n")}


def test_output_is_tagged_except_that_of_rank_0_and_nothing_is_lost(restarted: Launched) -> None:
    assert sorted(restarted.out.splitlines()) == [
        "[rank 1] rank 1 is done", "[rank 1] the last line", "[rank 2] rank 2 is done",
        "rank 0 is done"]
    assert "[rank 1] unfinished line\n" in restarted.err
    assert "RuntimeError: as scripted\n" in restarted.err


def test_a_rank_has_its_own_session_and_the_variables_that_torchrun_sets(
    restarted: Launched,
) -> None:
    expected = {
        "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3", "ROLE_WORLD_SIZE": "3",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TRAINER_LAUNCH": "1",
    }

    notes = restarted.notes("started")

    for note in notes:
        env = note["env"]
        assert {name: env.get(name) for name in expected} == expected
        assert env["TORCHELASTIC_RESTART_COUNT"] == str(note["attempt"])
        assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == str(note["rank"])
        assert note["sid"] == note["pid"]
    assert len({note["env"]["TORCHELASTIC_RUN_ID"] for note in notes}) == 1
    assert len({note["env"]["TRAINER_LAUNCH_ID"] for note in notes}) == 1
    ports = {(note["attempt"], note["env"]["MASTER_PORT"]) for note in notes}
    assert len(ports) == 4  # one store for each attempt


def test_the_count_of_failures_restarts_when_a_later_step_was_saved(tmp_path: Path) -> None:
    script = {"0.0": "save=10", "1.0": "save=20", "2.0": "save=20", "3.0": "save=30"}

    with Launched(tmp_path / "run", script, "--max-restarts=1") as launch:
        code = launch.end()

        assert code == 1
        assert len(launch.notes("started")) == 3
        assert launch.err.count("rank 0 exited with code 1; restart 1 of 1, 2 steps lost, ") == 2
        assert "rank 0 exited with code 1; giving up, 1 of 1 restarts used" in launch.err


def test_the_run_continues_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", {"0.0": "serve", "0.1": "serve"}, num_ranks=2) as launch:
        [note, _] = launch.wait_notes("serving", 2) and launch.notes("started")

        os.kill(note["server"], signal.SIGKILL)
        code = launch.end()

        assert code == 0
        assert "launch: the fork server has died; restart 1 of 3" in launch.err
        assert len(launch.notes("sigterm")) == 2  # the complete group could save
        assert len(launch.notes("started", attempt=1)) == 2
        assert not any(map(alive, launch.pids()))


def test_no_exit_is_mistaken_for_completion_or_overlooked(tmp_path: Path) -> None:
    script = {"0.0": "vanish=0", "0.1": "follow=1", "1.0": "stop_server", "1.1": "follow=1",
              "2.0": "follow=1", "2.1": "vanish=75",
              "3.0": "linger=3", "3.1": "follow=1"}  # a thread that runs on delays no restart

    with Launched(tmp_path / "run", script, "--max-restarts=4", num_ranks=2) as launch:
        assert launch.end() == 0

        assert len(launch.notes("started")) == 10
        lines = [line for line in launch.err.splitlines() if line.startswith("launch: ")]
        vanished, continued, left, stopped, lingered = lines
        early = "before it had finished"
        assert vanished.startswith(f"launch: rank 0 exited with code 0 {early}; restart 1 ")
        assert continued == "launch: the fork server was stopped: continued"
        assert left.startswith("launch: rank 0 exited with code 4; restart 2 ")
        assert stopped.startswith(f"launch: rank 1 exited with code 75 {early}; restart 3 ")
        assert lingered.startswith("launch: rank 0 exited with code 3; restart 4 of 4")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_attempts_leave_nothing_in_launcher_fork_server_and_on_disk(
    tmp_path: Path,
) -> None:
    temporary, held = tmp_path / "temporary", tmp_path / "held.jsonl"
    temporary.mkdir()
    before = machine.shared_memory()
    path = os.pathsep.join([str(HERE), str(ROOT)])
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(
            [sys.executable, "-m", "launch", "--max-restarts=1000", "--entry=crash_loop:main", "--",
             str(held), "1000"], cwd=ROOT, stdout=log, stderr=log, process_group=0,
            env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}) as launcher:
        assert launcher.wait(800) == 0, (tmp_path / "log").read_text()[-2000:]

    lines = [json.loads(line) for line in held.read_text().splitlines()]
    assert [line["attempt"] for line in lines] == list(range(1001))
    # At the start of a rank, its predecessor's descriptors may be open for a moment.
    early, late = lines[:100], lines[-100:]
    for process in ("launcher", "server"):
        for what in ("descriptors", "children", "threads"):
            values = [[line[process][what] for line in part] for part in (early, late)]
            assert max(values[1]) <= max(values[0]), (process, what)
        assert late[0][process]["kib"] < early[20][process]["kib"] + (16 << 10), process
    assert {line["server"]["children"] for line in late} == {1}  # the rank itself: no zombies
    assert [path.name for path in temporary.iterdir()  # torch's cache
            if not path.name.startswith("torchinductor_")] == []
    assert machine.left_in_shared_memory(before, [launcher.pid]) == set()
