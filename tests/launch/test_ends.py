"""How a launch ends: by the exit codes of the ranks, a stop, or the launcher's own death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import machine
import pytest
import scripted
from launching import Launched
from machine import AT_ONCE_S, GONE_S, wait_gone


@pytest.mark.parametrize(("name", "ended"), [
    ("refused", (2, "", "no such data\n")), ("helped", (0, "usage\n", ""))])
def test_refused_arguments_and_help_start_no_rank(tmp_path, name, ended):
    with Launched(tmp_path / name, {}) as launch:
        assert (launch.end(), launch.out, launch.err) == ended


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_the_launcher_can_be_stopped_while_the_trainer_is_imported(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Launched(tmp_path / "endless", {}) as launch:
        launch.wait_notes("loading", 1)

        launch.process.send_signal(number)

        assert launch.end() == code
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()


def test_the_launcher_can_be_stopped_during_its_own_imports(tmp_path: Path, monkeypatch) -> None:
    stub, noted = tmp_path / "torch/__init__.py", tmp_path / "importing"
    stub.parent.mkdir()
    stub.write_text(
        f"import pathlib, time\npathlib.Path({str(noted)!r}).touch()\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Launched(tmp_path / "run", {}) as launch:
        scripted.wait_for(lambda: list(tmp_path.glob(noted.name)))

        launch.process.send_signal(signal.SIGINT)

        assert launch.end() == 75


def test_one_ctrl_c_signals_each_rank_once(tmp_path: Path) -> None:
    script = {"0.0": "serve", "0.1": "serve"}
    with Launched(tmp_path / "run", script, num_ranks=2) as launch:
        launch.wait_notes("serving", 2)

        os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does

        assert launch.end() == 75
        assert sorted(note["rank"] for note in launch.notes("sigterm")) == [0, 1]
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()


def test_a_second_ctrl_c_kills_ranks_that_do_not_stop(tmp_path: Path) -> None:
    script = {"0.0": "stubborn", "0.1": "stopped"}
    with Launched(tmp_path / "run", script, num_ranks=2) as launch:
        launch.wait_notes("serving", 2)

        launch.process.send_signal(signal.SIGUSR1)
        launch.wait_notes("sigterm", 1)
        launch.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            launch.end(timeout_s=0.3)
        while launch.process.poll() is None:  # two signals before the handler runs count as one
            launch.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.end(timeout_s=0.5)

        assert launch.end() == 1
        assert len(launch.notes("sigterm")) == 1
        assert wait_gone(launch.pids(), AT_ONCE_S) == set()


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.long)])
def test_all_processes_exit_5_s_after_the_launchers_death(tmp_path: Path, stopped: bool) -> None:
    script = {"0.0": "orphan", "0.1": "stubborn", "0.2": "stopped"}
    before = machine.shared_memory()
    with Launched(tmp_path / "run", script, num_ranks=3) as launch:
        launch.wait_notes("serving", 3)
        sockets = machine.listening(launch.process.pid)

        if stopped:  # the fork server, too
            os.kill(launch.notes("started")[0]["server"], signal.SIGSTOP)
        launch.process.kill()
        killed_s = time.monotonic()
        [saved] = launch.wait_notes("saved", 1)

        assert saved["time_s"] - killed_s < GONE_S
        assert wait_gone(launch.pids(), GONE_S - (time.monotonic() - killed_s)) == set()
        assert machine.left_in_shared_memory(before, {launch.process.pid, *launch.pids()}) == set()
        assert len(sockets) == 1
        assert sockets.keys().isdisjoint(machine.listeners())
