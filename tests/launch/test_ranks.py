"""What the launcher makes of its fork server's messages, in whatever order they come."""

from __future__ import annotations

import os
import socket

import pytest

from launch import forkserver
from launch.output import Output
from launch.ranks import Ranks
from launch.signals import StopRequest


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ends_of_ranks_that_come_together_with_their_closed_channels_are_ends(
    num_ranks: int,
) -> None:
    control, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stop = StopRequest()
    stop.wakeup_fd, write_fd = os.pipe()
    ranks = Ranks((0, control), entry="", argv=[], stop=stop, output=Output())
    channels = [socket.socketpair() for _ in range(num_ranks)]
    for rank, (ours, _) in enumerate(channels):
        started = {"started": rank, "pid": 1000 + rank}
        forkserver.send(server, started, [os.pidfd_open(os.getpid()), ours.fileno()])
    ranks.start({rank: {"RANK": str(rank)} for rank in range(num_ranks)})

    for rank, (ours, theirs) in enumerate(channels):
        forkserver.send(server, {"exited": 1000 + rank, "code": rank})
        theirs.close()
        ours.close()
    exits = []
    while len(exits) < num_ranks:
        exits += ranks.wait(10.0)

    assert [(end.rank, end.code) for end in exits] == [(rank, rank) for rank in range(num_ranks)]
    assert ranks.living == []
    for fd in (stop.wakeup_fd, write_fd):
        os.close(fd)
    control.close()
    server.close()
