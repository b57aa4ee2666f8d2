"""Whichever process is killed, all others exit within 5 s, and a new start at once continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import pytest
from launches import Launch
from machine import GONE_S, alive, wait_gone
from runs import TAPE

from benchmarks.chaos_run import children
from trainer.commands.compare import differences

STEPS = 200
FLAGS = (*TAPE, "--task=failing_task:Failing", "--task.norm=batch", "--data.workers=2",
         f"--steps={STEPS}", "--checkpoint.every=50", "--log.level=warning")


class Run:
    def __init__(self, folder: Path, by: str) -> None:
        self.path, self.by = folder / "run", by
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.shared = machine.shared_memory()

    @contextmanager
    def launch(self) -> Iterator[Launch]:
        launch = Launch(self.path, *FLAGS, by=self.by, options=["--max-restarts=3"],
                        TMPDIR=str(self.temporary), SLOW_TRAIN_S="0.005").start()
        try:
            yield launch
        finally:
            for pid in launch.tree():
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            launch.process.wait()

    def wait_step(self, launch: Launch, step: int, *, attempt: int = 0) -> None:
        launch.wait(lambda: launch.step() >= step and any(
            e["attempt"] >= attempt for e in launch.events("first-step")), f"step {step}")

    def check_all_gone(self, pids: list[int], sockets: dict[str, str], killed_s: float) -> None:
        assert wait_gone(set(pids), GONE_S - (time.monotonic() - killed_s)) == set()
        assert machine.left_in_shared_memory(self.shared, pids) == set()
        assert sockets.keys().isdisjoint(machine.listeners())

    def check_nothing_is_left(self) -> None:
        assert [path.name for path in self.temporary.iterdir()  # torch's cache, torchrun's logs
                if not path.name.startswith(("torchinductor_", "torchelastic_"))] == []


@pytest.mark.timeout(600)
def test_nothing_is_left_behind_and_the_next_start_is_safe(undisturbed, tmp_path: Path) -> None:
    run = Run(tmp_path, "launch")
    with run.launch() as first:
        run.wait_step(first, 40)
        pids, ranks = first.tree(), first.ranks()
        assert len(pids) == 1 + 1 + 2 + 2 * 2
        os.kill(ranks[1], signal.SIGKILL)
        server = children(pids[0])[0]
        assert wait_gone(set(pids) - {pids[0], server}, GONE_S) == set()
        run.wait_step(first, 50, attempt=1)

        pids, sockets = first.tree(), machine.listening(first.process.pid)
        killed_s = time.monotonic()
        first.process.kill()
        with run.launch() as second:  # while the orphans are still alive
            run.check_all_gone(pids, sockets, killed_s)
            run.wait_step(second, 70, attempt=2)

            pids, sockets = second.tree(), machine.listening(second.process.pid)
            workers = [pid for rank in second.ranks() for pid in children(rank)]
            assert len(workers) == 4
            killed_s = time.monotonic()
            for pid in pids:
                if pid not in workers:
                    os.kill(pid, signal.SIGKILL)
            second.process.wait()
            run.check_all_gone(pids, sockets, killed_s)

    with run.launch() as third:
        run.wait_step(third, 100, attempt=3)
        server, *pids = third.tree()[1:]
        os.kill(server, signal.SIGKILL)
        run.wait_step(third, 110, attempt=4)
        assert not any(map(alive, [server, *pids]))
        pids, sockets = third.tree(), machine.listening(third.process.pid)
        third.end()
        run.check_all_gone(pids, sockets, time.monotonic())

    run.check_nothing_is_left()
    assert not list(differences(undisturbed(2, *FLAGS), run.path))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_left_behind_by_plain_torchrun_either(tmp_path: Path) -> None:
    run = Run(tmp_path, "torchrun")
    with run.launch() as first:
        run.wait_step(first, 40)
        pids, sockets = first.tree(), machine.listening(first.process.pid)
        assert len(pids) == 1 + 2 + 2 * 2
        killed_s = time.monotonic()
        first.process.kill()
        with run.launch() as second:
            run.check_all_gone(pids, sockets, killed_s)
            pids = second.tree()
            second.end()
            run.check_all_gone(pids, {}, time.monotonic())

    run.check_nothing_is_left()
    assert second.step() == STEPS
