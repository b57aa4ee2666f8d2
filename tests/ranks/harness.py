"""Runs a function in freshly forked ranks, from a server process that has torch imported once.

Linux only. A rank costs a fork (milliseconds) instead of an import of torch (seconds).
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

GRACE_S = 5.0  # how long the others may go on after a rank failed: their own errors come in it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: by `value`, `error`, `signal`, `exit_code`, or `hung` (was killed); when,
    by time.monotonic, and what it wrote to stdout and stderr."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    signal: int | None = None
    exit_code: int | None = None
    hung: bool = False
    at: float = 0.0
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned and the rank left in order."""
        return not (self.error or self.hung or self.signal or self.exit_code is not None)


class Ranks:
    """The client's end: `ranks(world_size, function, *args, **kwargs)`; see `__call__`."""

    def __init__(self) -> None:
        self._start()

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any,
                 **options: Any) -> list[Any]:
        """The results of `function(*args, **kwargs)` in `world_size` new processes, by rank.

        Each rank has one intra-op thread, generators seeded with 0, and warnings as errors. Raises
        what the rank that failed first has raised, with rank and traceback as a note, or a
        RuntimeError if it died or hung, with its output or all stacks.

        Args:
            function: at module level; arguments and results are pickled.
            options: `timeout_s` (100): seconds from the fork to the last result.
                `group` (True): a gloo process group is formed before and destroyed after the call;
                False: no group, only the variables that torchrun sets, with a free port.
                `env`: more environment variables. {rank} in a value becomes the rank.
                The others are arguments of the function.
        """
        outcomes = self._run(world_size, function, args, GRACE_S, **options)
        for outcome in outcomes:
            if outcome.output and (outcome.ok or outcome.error):  # else it is in the exception
                print(f"--- output of rank {outcome.rank}\n{outcome.output}")
        _raise_first_failure(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any,
                 **options: Any) -> list[Outcome]:
        """How each rank ended, for tests in which ranks die: the others go on after a death."""
        return self._run(world_size, function, args, None, **options)

    def close(self) -> None:
        """End the server, which ends every process that it started."""
        self._connection.close()
        self._server.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from rank_server import serve; serve({theirs.fileno()})"
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
                                "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            # Its own session: Ctrl-C reaches pytest alone, and the server ends when pytest does.
            self._server = subprocess.Popen([sys.executable, "-c", code], env=env,
                                            stdin=subprocess.DEVNULL, start_new_session=True,
                                            pass_fds=[theirs.fileno()])
        self._connection = Connection(ours.detach())

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...],
             grace_s: float | None, *, timeout_s: float = 100.0, group: bool = True,
             env: Mapping[str, str] | None = None, **kwargs: Any) -> list[Outcome]:
        request = {"world_size": world_size, "call": pickle.dumps((function, args, kwargs)),
                   "module": function.__module__, "timeout_s": timeout_s, "group": group,
                   "grace_s": grace_s or timeout_s, "path": sys.path, "cwd": os.getcwd(),
                   "environ": dict(os.environ), "env": dict(env or {})}
        try:
            self._connection.send(request)
            reply = self._connection.recv()
        except BaseException:  # a test's time limit, Ctrl-C: begin afresh next time
            self.close()
            self._start()
            raise
        results = [pickle.loads(fields.pop("result")) for fields in reply]
        return [Outcome(**fields | result) for fields, result in zip(reply, results, strict=True)]


def _raise_first_failure(outcomes: list[Outcome]) -> None:
    # A peer's error may be stamped before the death that caused it is seen: a moment, or longer
    # where the server has to wait for a core. Who is killed is nobody's echo.
    failed = sorted((o for o in outcomes if not o.ok), key=lambda o: (
        o.hung, o.at - (10.0 if o.signal else 0.0 if o.error else 0.5)))
    if failed:
        first = failed[0]
        how = ("has no result in time" if first.hung else f"died by signal {first.signal}"
               if first.signal else f"left with exit code {first.exit_code}")
        output = "\n".join(f"rank {o.rank}:\n{o.output}" for o in failed if not o.error)
        raise first.error or RuntimeError(f"rank {first.rank} of {len(outcomes)} {how}\n{output}")
