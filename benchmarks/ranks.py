"""New processes that are the ranks of a run, for benchmarks that time inside of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any


def in_ranks(target: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `target(launch, *arguments)` returns in each of `size` ranks on this host.

    Raises:
        SystemExit: it failed in a rank; says how.
    """
    spawn = multiprocessing.get_context("spawn")
    port = _free_port()
    ranks, pipes = [], []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_call, args=(theirs, target, rank, size, port, arguments))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    try:
        answers = [_answer(pipe, rank) for rank, pipe in enumerate(pipes)]
        for process in ranks:
            process.join()
        return answers
    finally:
        for process in ranks:
            process.kill()


def _answer(pipe: Any, rank: int) -> Any:
    try:
        answer, problem = pipe.recv()
    except EOFError:
        raise SystemExit(f"rank {rank} is gone without an answer") from None
    if problem:
        raise SystemExit(f"rank {rank} failed:\n{problem}")
    return answer


def _call(
    pipe: Any, target: Callable[..., Any], rank: int, size: int, port: int,
    arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    from trainer.distributed.world import LaunchInfo

    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": f"{rank}",
                   "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": f"{port}"}
    try:
        pipe.send((target(LaunchInfo.from_environment(), *arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise SystemExit(1) from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
