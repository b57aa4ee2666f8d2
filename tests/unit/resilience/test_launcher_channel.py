"""Messages of the launcher to a rank; a superseded attempt writes nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from launch.fork_server import fork
from trainer.errors import StaleAttempt
from trainer.resilience.launcher_channel import Orders
from trainer.storage.locks import RunLock


class Group:
    """Records whether it is abandoned."""

    def __init__(self) -> None:
        self.superseded = False
        self.abandoned = threading.Event()

    def supersede(self) -> None:
        self.superseded = True

    def abandon(self) -> None:
        self.abandoned.set()


@pytest.mark.parametrize(("word", "stale"), [("lost", False), ("stale", True)])
def test_a_message_abandons_the_group_and_the_launchers_death_is_noticed(word, stale):
    ours, theirs = socket.socketpair()
    orders, group = Orders(), Group()
    orders.attach(group)
    gone = orders.follow(theirs.fileno())

    ours.send(f"{word}\n".encode())

    assert group.abandoned.wait(100)
    assert group.superseded is stale
    assert select.select([gone], [], [], 0)[0] == []
    ours.close()
    assert select.select([gone], [], [], 100)[0] == [gone]
    os.close(gone)
    theirs.close()


def test_a_missing_rank_ends_only_ranks_that_wait_for_it():
    ours, theirs = socket.socketpair()
    if (pid := fork()) == 0:
        try:
            Orders().follow(theirs.fileno())
            time.sleep(100)  # until the message ends it
        finally:
            os._exit(99)
    orders, group = Orders(), Group()
    orders.attach(group)
    orders._obey("absent")

    ours.send(b"absent\n")

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not group.abandoned.is_set()
    ours.close()
    theirs.close()


def test_a_superseded_attempt_writes_nothing(tmp_path: Path):
    group = Group()
    lock = RunLock(tmp_path / "lock", "one", revoked=lambda: group.superseded)
    lock.take()
    lock.check_without_waiting()

    group.superseded = True

    with pytest.raises(StaleAttempt), lock.committing():
        raise AssertionError("it wrote")
    with pytest.raises(StaleAttempt, match="a newer attempt"):
        lock.check_without_waiting()
    lock.close()
