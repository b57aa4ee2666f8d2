"""How a launch ends: the ranks' own verdict, a stop, or the death of the launcher itself."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import scripted
from launching import AT_ONCE_S, GONE_S, Launched, listeners, listening, wait_gone
from machine import left_in_shared_memory, shared_memory

from launch import forkserver, rank
from trainer import stop


def test_a_final_exit_code_is_passed_through_though_its_echo_comes_first(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", {"0.0": "exit=1", "0.1": "echo=77"}, num_ranks=2) as launch:
        assert launch.end() == 77
        assert len(launch.notes("started")) == 2


def test_nothing_starts_where_the_trainer_refuses_its_arguments(tmp_path: Path) -> None:
    with Launched(tmp_path / "refused", {}) as launch:
        assert launch.end() == 2
        assert launch.err == "no such data\n"


def test_nothing_starts_and_nothing_failed_where_only_help_was_asked_for(tmp_path: Path) -> None:
    with Launched(tmp_path / "helped", {}) as launch:
        assert launch.end() == 0
        assert (launch.out, launch.err) == ("usage\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_the_launcher_can_be_ended_while_the_trainer_is_imported(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Launched(tmp_path / "endless", {}) as launch:
        launch.wait_notes("loading", 1)

        launch.process.send_signal(number)

        assert launch.end() == code
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()


def test_the_launcher_can_be_ended_amid_its_own_imports(tmp_path: Path, monkeypatch) -> None:
    stub, noted = tmp_path / "torch/__init__.py", tmp_path / "importing"
    stub.parent.mkdir()
    stub.write_text(
        f"import pathlib, time\npathlib.Path({str(noted)!r}).touch()\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Launched(tmp_path / "run", {}) as launch:
        scripted.wait_for(lambda: list(tmp_path.glob(noted.name)))

        launch.process.send_signal(signal.SIGINT)

        assert launch.end() == 75


def test_one_ctrl_c_asks_each_rank_once(tmp_path: Path) -> None:
    script = {"0.0": "serve", "0.1": "serve"}
    with Launched(tmp_path / "run", script, num_ranks=2) as launch:
        launch.wait_notes("serving", 2)
        # What the launcher listens on, with its server's and ranks' sockets, is for this host only.
        sockets = {}
        for pid in {launch.process.pid, *launch.pids()}:
            sockets |= listening(pid)

        os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does
        code = launch.end()

        assert code == 75
        assert set(sockets.values()) == {"0100007F"}
        assert sorted(note["rank"] for note in launch.notes("asked")) == [0, 1]
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()
        assert sockets.keys().isdisjoint(listeners())


def test_a_second_ctrl_c_kills_ranks_that_do_not_stop(tmp_path: Path) -> None:
    script = {"0.0": "stubborn", "0.1": "stopped"}
    with Launched(tmp_path / "run", script, num_ranks=2) as launch:
        launch.wait_notes("serving", 2)

        launch.process.send_signal(signal.SIGUSR1)
        launch.wait_notes("asked", 1)
        launch.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            launch.end(timeout_s=0.3)
        while launch.process.poll() is None:  # two that come before its turn are one
            launch.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.end(timeout_s=0.5)

        assert launch.end() == 1
        assert len(launch.notes("asked")) == 1
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()


def test_what_ends_orphans_is_quicker_than_5_s() -> None:
    assert max(forkserver.MOURNING_S, rank.ORPHAN_S, stop.ORPHAN_LIMIT_S) < 5.0
    assert AT_ONCE_S < forkserver.MOURNING_S


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_lives_5_s_after_the_launcher_was_killed(tmp_path: Path, stopped: bool) -> None:
    script = {"0.0": "orphan", "0.1": "stubborn", "0.2": "stopped"}
    before = shared_memory()
    with Launched(tmp_path / "run", script, num_ranks=3) as launch:
        launch.wait_notes("serving", 3)
        sockets = listening(launch.process.pid)

        if stopped:  # the fork server, too
            os.kill(launch.notes("started")[0]["server"], signal.SIGSTOP)
        launch.process.kill()
        killed_s = time.monotonic()
        [saved] = launch.wait_notes("saved", 1)

        assert saved["time_s"] - killed_s < GONE_S
        assert wait_gone(launch.pids(), GONE_S - (time.monotonic() - killed_s)) == set()
        assert left_in_shared_memory(before, {launch.process.pid, *launch.pids()}) == set()
        assert len(sockets) == 1
        assert sockets.keys().isdisjoint(listeners())


@pytest.mark.long  # the agent waits half a minute for the rank that is left
def test_a_limit_that_the_launcher_meets_is_told_with_what_helps(tmp_path: Path) -> None:
    script = {"0.0": "serve", "0.1": "serve"}
    with Launched(tmp_path / "run", script, num_ranks=2) as launch:
        [first, _] = launch.wait_notes("serving", 2)
        # No more than the fork server holds, so that the next attempt gets no socket.
        resource.prlimit(launch.process.pid, resource.RLIMIT_NOFILE, (8, 8))
        os.kill(first["pid"], signal.SIGKILL)
        code = launch.end()

        assert code == 1
        assert "Too many open files; raise the limit of open files: ulimit -n" in launch.err
        assert launch.err.rstrip().splitlines()[-1].startswith("launch: error: OSError: ")
        assert wait_gone(launch.pids(), GONE_S) == set()


def test_a_rank_without_launcher_and_fork_server_ends_itself(tmp_path: Path) -> None:
    with Launched(tmp_path / "run", {"0.0": "stubborn"}) as launch:
        [started] = launch.wait_notes("serving", 1) and launch.notes("started")

        os.kill(started["server"], signal.SIGSTOP)
        launch.process.kill()
        os.kill(started["server"], signal.SIGKILL)

        assert wait_gone(launch.pids(), GONE_S) == set()
