"""Compiled models: a kill during a compilation, and a kill after it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from hosts import Node, wait_until

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.norm=group", "--world.threads=1", "--eval.every=off",
        "--precision.compile=on", "--steps=8"]  # fmt: skip

LIMIT_S = 500.0


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_kill_during_compilation_discards_the_cache_and_a_later_kill_recompiles_nothing(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    cache = run / "compile-cache"
    node = Node(None, run, "--nproc-per-node=2", "--", *TASK, "--inject=kill:rank=0:step=4")
    with node:
        node.start()
        # The compiler has written files to the cache: the compilation is in progress.
        wait_until(lambda: list(cache.glob("*.compiling-1")) and list(cache.rglob("*.cpp")),
                   "rank 1 compiles", node)
        incomplete = next(cache.glob("*-torch*/")) / "incomplete"
        incomplete.touch()
        os.kill(rank(node, 1), signal.SIGKILL)
        assert node.process is not None
        assert node.process.wait(LIMIT_S) == 0, node.err.read_text()

    # Only the two kills caused a restart.
    assert [e["attempt"] for e in node.events(event="death")] == [0, 1]
    assert {e["attempt"] for e in node.events(event="start")} == {0, 1, 2}
    [kill] = node.events(event="fault")
    assert [path.name for path in cache.iterdir() if "compiling" in path.name] == []
    assert incomplete.parent.is_dir()
    assert not incomplete.exists()
    late = [path for path in cache.rglob("*") if path.is_file()
            and path.stat().st_mtime > kill["time"]]
    assert late == []  # no graph and no library was recompiled


def rank(node: Node, number: int) -> int:
    """The pid of a rank."""
    for pid in node.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"rank {number}":
                return pid
    raise AssertionError(f"rank {number} is not alive")
