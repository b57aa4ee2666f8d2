"""How the launcher handles messages of its fork server, in any order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launch import fork_server
from launch.output import Output
from launch.signals import LauncherStop
from launch.workers import Workers


@contextmanager
def served() -> Iterator[tuple[Workers, socket.socket]]:
    """The object under test, and the fork server's end of its connection."""
    control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stop = LauncherStop()
    stop.wakeup_fd, write_fd = os.pipe()
    yield Workers((0, control), entry="", argv=[], stop=stop, output=Output()), server
    for fd in (stop.wakeup_fd, write_fd):
        os.close(fd)
    control.close()
    server.close()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_exits_that_arrive_together_with_closed_channels_are_reported(num_ranks: int) -> None:
    with served() as (ranks, server):
        channels = [socket.socketpair() for _ in range(num_ranks)]
        for rank, (ours, _) in enumerate(channels):
            started = {"started": rank, "pid": 1000 + rank}
            fork_server.send(server, started, [os.pidfd_open(os.getpid()), ours.fileno()])
        ranks.start({rank: {"RANK": str(rank)} for rank in range(num_ranks)})

        for rank, (ours, theirs) in enumerate(channels):
            fork_server.send(server, {"exited": 1000 + rank, "code": rank})
            theirs.close()
            ours.close()
        exits = []
        while len(exits) < num_ranks:
            exits += ranks.wait(10.0)

        assert [(e.rank, e.code) for e in exits] == [(rank, rank) for rank in range(num_ranks)]
        assert ranks.living == []


def test_only_a_rank_that_stays_stopped_is_killed() -> None:
    with served() as (ranks, server):
        processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                     for _ in range(2)]  # fmt: skip
        channels = [socket.socketpair() for _ in processes]
        for rank, process in enumerate(processes):
            started = {"started": rank, "pid": process.pid}
            fork_server.send(server, started,
                             [os.pidfd_open(process.pid), channels[rank][0].fileno()])
        ranks.start({rank: {"RANK": str(rank)} for rank in range(2)})

        os.kill(processes[1].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, processes[1].pid, os.WSTOPPED | os.WNOWAIT)
        killed = [ranks.kill_stopped(checks=2) for _ in range(3)]

        assert killed == [[], [1], []]
        assert processes[1].wait(100) == -signal.SIGKILL
        assert processes[0].poll() is None
        processes[0].kill()
        processes[0].wait()
        for process, (ours, theirs) in zip(processes, channels, strict=True):
            fork_server.send(server, {"exited": process.pid, "code": -9})
            ours.close()
            theirs.close()
        while ranks.living:
            ranks.wait(10.0)
