"""How the launcher handles messages of its fork server, in any order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from launch import fork_server, workers
from launch.output import Output
from launch.signals import LauncherStop


@contextmanager
def started(*pids: int) -> Iterator[tuple[workers.Workers, socket.socket, list[socket.socket]]]:
    """Ranks with these pids, the fork server's end of its connection, the ranks' channels."""
    control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stop = LauncherStop()
    stop.wakeup_fd, write_fd = os.pipe()
    ranks = workers.Workers((0, control), entry="", argv=[], stop=stop, output=Output())
    pairs = [socket.socketpair() for _ in pids]
    for rank, (pid, (ours, _)) in enumerate(zip(pids, pairs, strict=True)):
        fork_server.send(server, {"started": rank, "pid": pid},
                         [os.pidfd_open(os.getpid() if pid < 0 else pid), ours.fileno()])
        ours.close()
    ranks.start({rank: {"RANK": str(rank)} for rank in range(len(pids))})
    yield ranks, server, [theirs for _, theirs in pairs]
    for rank, (pid, (_, theirs)) in enumerate(zip(pids, pairs, strict=True)):
        fork_server.send(server, {"exited": pid, "code": rank})
        theirs.close()
    while ranks.living:
        ranks.wait(10.0)
    for fd in (stop.wakeup_fd, write_fd):
        os.close(fd)
    control.close()
    server.close()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_exits_that_arrive_together_with_closed_channels_are_reported(num_ranks: int) -> None:
    pids = [-rank for rank in range(1, num_ranks + 1)]
    with started(*pids) as (ranks, server, channels):
        for rank, (pid, channel) in enumerate(zip(pids, channels, strict=True)):
            fork_server.send(server, {"exited": pid, "code": rank})
            channel.close()
        exits = []
        while len(exits) < num_ranks:
            exits += ranks.wait(10.0)

        assert [(e.rank, e.code) for e in exits] == [(rank, rank) for rank in range(num_ranks)]
        assert ranks.living == []


def test_only_a_rank_that_stays_stopped_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHECK_S", 0.0)
    monkeypatch.setattr(workers, "RANK_CHECKS", 2)
    with ExitStack() as stack:
        runs, stops = (stack.enter_context(subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"])) for _ in range(2))
        stack.callback(runs.kill)
        stack.callback(stops.kill)
        with started(runs.pid, stops.pid) as (ranks, *_):
            os.kill(stops.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, stops.pid, os.WSTOPPED | os.WNOWAIT)
            ranks.wait(0.0)
            assert stops.poll() is None
            ranks.wait(0.0)

            assert stops.wait(100) == -signal.SIGKILL
            assert runs.poll() is None
