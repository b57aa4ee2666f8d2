"""What `python -m launch` tells a rank that runs: a rank or a node is lost, or a newer attempt has
begun."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from trainer.errors import EXIT_FAILURE


class Group(Protocol):
    """This attempt's ranks, as far as orders go."""

    stale: bool

    def abandon(self) -> None: ...


class Orders:
    """Reads the launcher's words in a thread of its own.

    `lost`: this rank may wait for one that is gone for ever: the connections with all of them are
    ended, and what waits finds its peer dead. `stale`: the same, and nothing is saved. `absent`: a
    rank has ended, which one that still waits for all to come can't see; the others can.
    """

    def __init__(self) -> None:
        self._group: Group | None = None

    def attach(self, group: Group) -> None:
        """Orders are for this group from now on. Before, they end the process: there is nothing
        to save, and it may wait for a rank that never comes."""
        self._group = group

    def follow(self, channel_fd: int) -> int:
        """Listen to the launcher; returns a descriptor that becomes readable once it is gone."""
        gone, tell = os.pipe()
        threading.Thread(
            target=self._listen, args=(channel_fd, tell), name="orders", daemon=True
        ).start()
        return gone

    def _listen(self, channel_fd: int, tell: int) -> None:
        while words := _read(channel_fd):
            for word in words.split():
                self._obey(word)
        os.write(tell, b"!")  # closing it wouldn't do: loader processes have inherited it

    def _obey(self, word: str) -> None:
        if word not in ("lost", "stale", "absent"):
            return
        if self._group is None:
            os._exit(EXIT_FAILURE)
        if word == "absent":
            return
        self._group.stale = word == "stale"
        self._group.abandon()


def _read(channel_fd: int) -> str:
    try:
        return os.read(channel_fd, 4096).decode()
    except ConnectionError:
        return ""
