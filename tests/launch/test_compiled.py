"""Compiled models: a kill during a compilation, and a kill after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launches import Launch
from runs import TAPE

from trainer.storage import processes

FLAGS = (*TAPE, "--task.norm=group", "--eval.every=off", "--precision.compile=on", "--steps=8")


@pytest.mark.long
@pytest.mark.timeout(700)
def test_a_kill_during_compilation_discards_the_cache_and_a_later_kill_recompiles_nothing(
    tmp_path: Path,
) -> None:
    cache = tmp_path / "run/compile-cache"
    with Launch(tmp_path / "run", *FLAGS, "--inject=kill:rank=0:step=4").start() as launch:
        # The compiler has written files to the cache: the compilation is in progress.
        launch.wait(lambda: list(cache.glob("*.compiling-1")) and list(cache.rglob("*.cpp")))
        incomplete = next(cache.glob("*-torch*/")) / "incomplete"
        incomplete.touch()
        [rank] = [pid for pid in launch.ranks() if processes.name(pid) == "rank 1"]
        os.kill(rank, signal.SIGKILL)
        launch.end(timeout_s=500)

    # Only the two kills caused a restart.
    assert [e["attempt"] for e in launch.events("death")] == [0, 1]
    assert {e["attempt"] for e in launch.events("start")} == {0, 1, 2}
    [kill] = launch.events("fault")
    assert [path.name for path in cache.iterdir() if "compiling" in path.name] == []
    assert incomplete.parent.is_dir()
    assert not incomplete.exists()
    late = [path for path in cache.rglob("*") if path.is_file()
            and path.stat().st_mtime > kill["time"]]
    assert late == []  # no graph and no library was recompiled
