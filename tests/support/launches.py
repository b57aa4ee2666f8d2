"""Real launches of the trainer in new processes: by `python -m launch`, by plain torchrun, or
without a launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runs
from machine import alive

from benchmarks.chaos_run import children
from trainer.storage.jsonl import newest_step

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
DEADLINE_S = 250.0


class Launch:
    """A command, its run folder and its log. Its context kills all processes at the end.

    Args:
        by: "launch", "torchrun", "torchrun with one store" for all attempts, or "" for `python -m
            trainer`.
        options: of the launcher.
        enter: the beginning of the command.
        env: more environment variables.
    """

    def __init__(self, run: Path, *arguments: str, by: str = "launch", size: int = 2,
                 options: Sequence[str] = ("--max-restarts=20",), enter: Sequence[str] = (),
                 **env: str) -> None:
        self.run, self.log = run, run.with_suffix(".log")
        torchrun = ["torch.distributed.run", f"--nproc_per_node={size}", *options, "-m", "trainer"]
        launcher = {
            "launch": ["launch", f"--nproc-per-node={size}", *options, "--"],
            "torchrun": [torchrun[0], "--standalone", *torchrun[1:]],
            "torchrun with one store": torchrun,
            "": ["trainer"],
        }[by]
        self._by = by
        self._command = [*enter, sys.executable, "-m", *launcher, f"--run-dir={run}",
                         "--world.threads=1", *arguments]
        self.env = env

    def start(self) -> Launch:
        kept = {k: v for k, v in os.environ.items() if "SOCKET_IFNAME" not in k}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT,
                process_group=0, env={**kept, "PYTHONPATH": PATH, **self.env})
        return self

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if hasattr(self, "process"):
            self.process.wait(DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """Pids of the launcher and of its descendants: fork server, ranks, their loader workers."""
        found, marker = [], os.fsencode(f"--run-dir={self.run}")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if marker in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in sorted(found) if alive(pid)]

    def tree(self, pid: int = 0) -> list[int]:
        """The launcher and its descendants, in order."""
        pid = pid or self.process.pid
        return [pid, *(p for child in children(pid) for p in self.tree(child))]

    def ranks(self) -> list[int]:
        if self._by.startswith("torchrun"):
            return children(self.process.pid)
        return [rank for server in children(self.process.pid) for rank in children(server)]

    def end(self, code: int = 0, timeout_s: float = 400.0) -> str:
        """Wait until the command exits with `code`; its output."""
        assert self.process.wait(timeout_s) == code, self.output()
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        return newest_step(self.run / "metrics.jsonl")

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        return runs.events(self.run, name, **fields)

    def wait(self, condition: Callable[[], Any], what: str = "") -> Any:
        return wait_until(condition, what, self)


def finish(run: Path, *arguments: str, **options: Any) -> Launch:
    """A launch that has ended with 0."""
    with Launch(run, *arguments, **options).start() as launch:
        launch.end()
    return launch


def wait_until(condition: Callable[[], Any], what: str, *launches: Launch) -> Any:
    """Wait until a condition is true, for at most `DEADLINE_S`; its value."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            logs = "\n".join(f"--- {each.log}\n{each.output()[-3000:]}" for each in launches)
            raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n{logs}")
        time.sleep(0.02)
    return found
