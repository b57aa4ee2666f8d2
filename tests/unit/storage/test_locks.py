"""Run lock: a living owner keeps the folder; orphans and earlier attempts lose it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from trainer.errors import StaleAttempt
from trainer.storage.locks import RunLock, living_owner

REPOSITORY = Path(__file__).parents[3]

PROCESS = """
import os, sys, traceback
from pathlib import Path
from trainer.storage.locks import RunLock
lock = RunLock(Path(sys.argv[1]), sys.argv[2], brief_lock_s=60)
for line in sys.stdin:
    command, *arguments = line.split()
    try:
        if command == "take":
            keys = dict(part.split("=") for part in arguments)
            pid = int(keys["launcher_pid"]) if "launcher_pid" in keys else None
            print(lock.take(launcher_pid=pid, launch_id=keys.get("launch_id"), wait_s=0))
        elif command == "check":
            print(lock.check_without_waiting())
        elif command == "fork":
            child = os.fork()
            if not child:
                os.read(int(arguments[0]), 1)
                os._exit(0)
            print(child)
        elif command == "commit":
            with lock.committing():
                print("committing", flush=True)
                sys.stdin.readline()
                Path(arguments[0]).touch()
            print("committed")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
"""


class Process(subprocess.Popen[str]):
    """An attempt that runs in a child process."""

    def tell(self, command: str) -> None:
        print(command, file=self.stdin, flush=True)

    def answer(self) -> str:
        return self.stdout.readline().rstrip()

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.answer()


class Processes:
    """Starts attempts and idle launchers; kills them at the end of the test."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack

    def attempt(self, nonce: str, pass_fds: tuple[int, ...] = ()) -> Process:
        return self._start("-S", "-c", PROCESS, str(self.path), nonce, pass_fds=pass_fds,
                           env=os.environ | {"PYTHONPATH": str(REPOSITORY)})

    def launcher(self) -> Process:
        return self._start("-I", "-S", "-c", "import sys; sys.stdin.read()")

    def _start(self, *command: str, **options: object) -> Process:
        process = self._stack.enter_context(Process(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            **options))
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(tmp_path / "lock", stack)


@pytest.mark.parametrize("launched", [False, True])
def test_the_folder_of_an_active_run_is_refused(processes: Processes, launched: bool) -> None:
    first, second = processes.attempt("first"), processes.attempt("second")
    takes = [f"take launcher_pid={processes.launcher().pid} launch_id={launch}" if launched
             else "take" for launch in "ab"]
    assert not living_owner(processes.path)
    assert first.ask(takes[0]) == "None"
    assert living_owner(processes.path)

    refusal = second.ask(takes[1])

    where = f"--run-dir {processes.path.parent}"
    assert refusal.startswith(f"ConfigError: {where}: another run is active")
    assert f"process {first.pid} " in refusal
    assert first.ask("check") == "None"
    assert second.ask("check").startswith("StaleAttempt")


def test_the_lock_of_a_dead_run_is_free_at_once_though_its_children_live(
        processes: Processes) -> None:
    reader, writer = os.pipe()
    first, second = processes.attempt("first", pass_fds=(reader,)), processes.attempt("second")
    first.ask("take")
    child = int(first.ask(f"fork {reader}"))
    first.kill()

    assert os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT) is not None
    os.kill(child, 0)  # it is alive
    assert not living_owner(processes.path)
    assert second.ask("take") == "None"
    assert second.ask("check") == "None"

    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize("reaped", [True, False])
def test_an_orphan_loses_the_folder(processes: Processes, reaped: bool) -> None:
    orphan, second, third = (processes.attempt(name) for name in ("orphan", "second", "third"))
    launcher = processes.launcher()
    orphan.ask(f"take launcher_pid={launcher.pid}")
    launcher.kill()
    if reaped:
        launcher.wait()
    else:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)

    answer = second.ask("take")

    assert answer.endswith("an orphan whose launcher is gone")
    assert f"process {orphan.pid} of attempt orphan" in answer
    assert orphan.ask("check").startswith("StaleAttempt")
    assert second.ask("check") == "None"
    # The second owner is alive; whether the orphan is makes no difference.
    assert third.ask("take").startswith("ConfigError")
    orphan.kill()
    orphan.wait()
    assert third.ask("take").startswith("ConfigError")
    assert second.ask("check") == "None"


@pytest.mark.parametrize("of", ["launcher", "launch"])
def test_an_earlier_attempt_of_the_same_launch_loses_the_folder(
        processes: Processes, of: str) -> None:
    first, second = processes.attempt("first"), processes.attempt("second")
    take = (f"take launcher_pid={processes.launcher().pid}" if of == "launcher"
            else "take launch_id=job-17")
    first.ask(take)
    first.send_signal(signal.SIGSTOP)

    answer = second.ask(take)

    assert answer.endswith(f"an earlier attempt of this {of}")
    first.send_signal(signal.SIGCONT)
    assert first.ask("check").startswith("StaleAttempt")


def test_a_survivor_of_the_attempt_may_still_write(processes: Processes) -> None:
    rank_0, rank_1 = processes.attempt("one"), processes.attempt("one")
    rank_0.ask("take")
    rank_0.kill()
    rank_0.wait()

    assert rank_1.ask("check") == "None"


def test_a_new_attempt_waits_for_a_commit_under_way(processes: Processes, tmp_path: Path) -> None:
    first, lock = processes.attempt("first"), RunLock(processes.path, "second", brief_lock_s=60)
    first.ask("take launch_id=a")
    assert first.ask(f"commit {tmp_path / 'done'}") == "committing"

    timer = threading.Timer(0.1, first.tell, ("go",))
    timer.start()
    lock.take(launch_id="a")

    timer.join()
    assert (tmp_path / "done").exists()
    assert first.answer() == "committed"
    assert first.ask(f"commit {tmp_path / 'again'}").startswith("StaleAttempt")
    lock.close()


def test_a_new_attempt_does_not_wait_for_a_stopped_process(
        processes: Processes, tmp_path: Path) -> None:
    first, lock = processes.attempt("first"), RunLock(processes.path, "second", brief_lock_s=0.1)
    first.ask("take launch_id=a")
    first.ask(f"commit {tmp_path / 'never'}")
    first.send_signal(signal.SIGSTOP)

    lock.take(launch_id="a")

    lock.check_without_waiting()
    lock.close()


def test_take_waits_for_an_owner_that_exits(processes: Processes) -> None:
    first, lock = processes.attempt("first"), RunLock(processes.path, "second")
    first.ask("take")

    timer = threading.Timer(0.1, first.kill)
    timer.start()

    assert lock.take(wait_s=60) is None
    timer.join()
    lock.close()


def test_removing_the_lock_file_ends_the_ownership(processes: Processes) -> None:
    first, second = processes.attempt("first"), processes.attempt("second")
    first.ask("take")

    processes.path.unlink()

    answer = first.ask("check")
    assert answer.startswith("StaleAttempt")
    assert "is gone: the run folder or this file in it was removed" in answer
    assert second.ask("take") == "None"
    assert first.ask("check").startswith("StaleAttempt")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", bytes(1024)])
def test_a_lock_file_without_an_owner_is_free(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    lock = RunLock(tmp_path / "lock", "one")
    with pytest.raises(StaleAttempt, match="no attempt does"):
        lock.check_without_waiting()

    assert lock.take() is None
    lock.check_without_waiting()
    lock.close()


def test_without_file_locks_every_take_succeeds_and_the_nonce_still_names_the_owner(
        processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    first, lock = processes.attempt("first"), RunLock(processes.path, "second")
    first.ask("take")

    def refuse(*arguments: object) -> None:
        raise OSError(number, "not now")

    monkeypatch.setattr("fcntl.lockf", refuse)
    number = errno.EIO  # an error of the disk
    with pytest.raises(OSError, match="not now"):
        lock.take()
    number = errno.ENOLCK
    assert lock.take() is None

    assert first.ask("check").startswith("StaleAttempt")
    lock.check_without_waiting()
    lock.close()


def test_the_owner_in_a_strange_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text('{"nonce": "\\ud800"}')
    lock = RunLock(path, "mine")

    assert living_owner(path) is None
    assert lock.take() is None

    lock.check_without_waiting()
    lock.close()
