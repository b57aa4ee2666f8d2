"""The cache of compiled code after an end amid a compile, and after an orderly one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from trainer.distributed.world import World
from trainer.optim.compile_cache import VARIABLE, use


def compile_something(folder: str, end: str) -> str:
    """In a rank: use the cache, compile as `end` says, and tell where it is."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    os.environ.pop(VARIABLE, None)
    with World.form(device="cpu") as world:
        use(Path(folder), world)
        place = Path(os.environ[VARIABLE])
        place.mkdir(exist_ok=True)
        world.barrier()
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            (place / f"half-{world.rank}").touch()
            world.barrier()
            if end == "kill" and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "raise" and world.rank == 1:
                raise ZeroDivisionError
    return str(place)


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_a_cache_is_made_anew_after_an_end_amid_a_compile_only(ranks, tmp_path, end):
    [place, _] = ranks(2, compile_something, str(tmp_path), "", group=False)
    kept = Path(place, "old")
    kept.touch()

    ranks(2, compile_something, str(tmp_path), "", group=False)
    assert kept.exists()
    ranks.outcomes(2, compile_something, str(tmp_path), end, group=False)
    assert [mark.suffix for mark in tmp_path.iterdir() if mark.is_file()] == [".compiling-1"]
    ranks(2, compile_something, str(tmp_path), "", group=False)

    assert not kept.exists()
    assert [path.name for path in tmp_path.iterdir()] == [Path(place).name]
