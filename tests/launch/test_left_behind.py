"""Whichever process is killed, all others exit within 5 s, and a new start at once continues."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import GONE_S, alive, listeners, listening, wait_gone
from machine import left_in_shared_memory, shared_memory

from benchmarks.chaos_run import children
from trainer.commands.compare import differences
from trainer.storage.files import read_json
from trainer.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 200
DEADLINE_S = 200.0


class Run:
    """A run folder and its launches, which have their own temporary folder."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self.path, self.launcher = folder / "run", launcher
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.shared = shared_memory()

    @contextmanager
    def launch(
        self, *arguments: str, path: Path | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        path = path or self.path
        command = {
            "launch": ["launch", "--nproc-per-node=2", "--", f"--run-dir={path}"],
            "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node=2",
                         "--max-restarts=3", "-m", "trainer", f"--run-dir={path}"],
        }[self.launcher]  # fmt: skip
        search = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
        env = os.environ | {"PYTHONPATH": search, "TMPDIR": str(self.temporary)}
        with path.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command, "--task=failing_task:Failing", "--device=cpu",
                 "--batch.global-size=8", "--batch.micro-size=2", "--task.samples=160",
                 "--task.norm=batch", "--data.workers=2", f"--steps={STEPS}", "--world.threads=1",
                 "--checkpoint.every=50", "--log.level=warning", *arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, process_group=0,
            )  # fmt: skip
        try:
            yield process
        finally:
            for pid in self.tree(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def tree(self, pid: int) -> list[int]:
        """A process and its descendants, in order."""
        return [pid, *(p for child in children(pid) for p in self.tree(child))]

    def ranks(self, pid: int) -> list[int]:
        """Pids of a launcher's ranks."""
        if self.launcher == "torchrun":
            return children(pid)
        return [rank for server in children(pid) for rank in children(server)]

    def wait_step(self, step: int, *, attempt: int = 0) -> None:
        """Wait until the run has reached a step in the given or a later attempt."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            last = max((n["step"] for n in read_metrics(self.path / "metrics.jsonl")), default=0)
            if last >= step and (read_json(self.path / "run.json") or {})["attempt"] >= attempt:
                return
            assert time.monotonic() < deadline_s, f"step {last} instead of {step}"
            time.sleep(0.02)

    def leftovers(self) -> list[str]:
        """Files in the temporary folder, except torch's cache and torchrun's logs."""
        return [path.name for path in self.temporary.iterdir()
                if not path.name.startswith(("torchinductor_", "torchelastic_"))]

    def check_all_gone(self, pids: list[int], sockets: dict[str, str], killed_s: float) -> None:
        """Assert that processes, shared memory and sockets are gone within `GONE_S`."""
        assert wait_gone(set(pids), GONE_S - (time.monotonic() - killed_s)) == set()
        assert left_in_shared_memory(self.shared, pids) == set()
        assert sockets.keys().isdisjoint(listeners())


@pytest.mark.timeout(600)
def test_nothing_is_left_behind_and_the_next_start_is_safe(tmp_path: Path) -> None:
    run = Run(tmp_path, "launch")
    with run.launch(path=tmp_path / "straight") as launcher:
        assert launcher.wait(DEADLINE_S) == 0

    with run.launch("--task.how=slow") as first:
        run.wait_step(40)
        pids, ranks = run.tree(first.pid), run.ranks(first.pid)
        assert len(pids) == 1 + 1 + 2 + 2 * 2
        os.kill(ranks[1], signal.SIGKILL)
        server = children(first.pid)[0]
        assert wait_gone(set(pids) - {first.pid, server}, GONE_S) == set()
        run.wait_step(50, attempt=1)

        pids, sockets = run.tree(first.pid), listening(first.pid)
        killed_s = time.monotonic()
        first.kill()
        with run.launch("--task.how=slow") as second:  # while the orphans are still alive
            run.check_all_gone(pids, sockets, killed_s)
            run.wait_step(70, attempt=2)

            pids, sockets = run.tree(second.pid), listening(second.pid)
            ranks = run.ranks(second.pid)
            workers = [pid for rank in ranks for pid in children(rank)]
            assert len(workers) == 4
            killed_s = time.monotonic()
            for pid in pids:
                if pid not in workers:
                    os.kill(pid, signal.SIGKILL)
            second.wait()
            run.check_all_gone(pids, sockets, killed_s)

    with run.launch("--task.how=slow") as third:
        run.wait_step(100, attempt=3)
        [server], pids = children(third.pid), run.tree(third.pid)[1:]
        os.kill(server, signal.SIGKILL)
        run.wait_step(110, attempt=4)
        assert not any(map(alive, pids))
        pids, sockets = run.tree(third.pid), listening(third.pid)
        assert third.wait(DEADLINE_S) == 0
        run.check_all_gone(pids, sockets, time.monotonic())

    assert run.leftovers() == []
    assert not list(differences(tmp_path / "straight", run.path))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_left_behind_by_plain_torchrun_either(tmp_path: Path) -> None:
    run = Run(tmp_path, "torchrun")
    with run.launch("--task.how=slow") as first:
        run.wait_step(40)
        pids, sockets = run.tree(first.pid), listening(first.pid)
        assert len(pids) == 1 + 2 + 2 * 2
        killed_s = time.monotonic()
        first.kill()
        with run.launch("--task.how=slow") as second:
            run.check_all_gone(pids, sockets, killed_s)
            pids = run.tree(second.pid)
            assert second.wait(DEADLINE_S) == 0
            run.check_all_gone(pids, {}, time.monotonic())

    assert run.leftovers() == []
    assert read_metrics(run.path / "metrics.jsonl")[-1]["step"] == STEPS
