"""Orders of `python -m launch` to a running rank: a rank is lost, or a newer attempt has begun."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from trainer.errors import EXIT_FAILURE


class Group(Protocol):
    """The ranks of this attempt, as orders need them."""

    stale: bool

    def abandon(self) -> None: ...


class Orders:
    """Reads the launcher's orders in a thread of its own.

    `lost`: this rank may wait for a rank that is gone: end all connections, so that every wait
    finds its peer dead. `stale`: the same, and save nothing. `absent`: a rank has ended before all
    have joined, which the ranks that still wait cannot see.
    """

    def __init__(self) -> None:
        self._group: Group | None = None

    def attach(self, group: Group) -> None:
        """Apply orders to this group from now on. Before, an order ends the process: there is
        nothing to save, and it may wait for a rank that never joins."""
        self._group = group

    def follow(self, channel_fd: int) -> int:
        """Listen to the launcher; returns a descriptor that becomes readable when it is gone."""
        gone, signal_end = os.pipe()
        threading.Thread(
            target=self._listen, args=(channel_fd, signal_end), name="orders", daemon=True
        ).start()
        return gone

    def _listen(self, channel_fd: int, signal_end: int) -> None:
        while words := _read(channel_fd):
            for word in words.split():
                self._obey(word)
        os.write(signal_end, b"!")  # closing it has no effect: loader processes have inherited it

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
