"""The rendezvous endpoint: hosting the store, connecting to it, detecting a silent store."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from launch.nodes.signed_store import SignedStore
from launch.rendezvous import host_store
from trainer.distributed import sockets
from trainer.errors import ConfigError

STORE_TIMEOUT_S = 4.0  # of an answer; shorter than the time after which this node counts as dead
CONNECT_S = 3.0
WAIT_S = 5.0  # how long to wait in the store for a value that another node writes
STORE_ERRORS = (RendezvousError, RuntimeError, OSError)  # of torch's rendezvous and stores


class Endpoint:
    """HOST:PORT and the store there, which the node with that address hosts. Its values are signed
    with `secret`; `on_forged` is called for each that is not."""

    def __init__(
        self, host: str, port: int, secret: bytes, on_forged: Callable[[], None]
    ) -> None:
        self._host, self._port = host, port
        self._secret, self._on_forged = secret, on_forged
        self._server: TCPStore | None = None  # serves as long as the object exists
        self._has_connected = False
        try:
            self.own_address, target = sockets.routes_to(host, port)[0]  # on the route to it
        except (OSError, IndexError) as error:
            why = getattr(error, "strerror", "this machine has no route to it")
            raise ConfigError(f"--rdzv-endpoint {self}: {why}; use an address that all nodes can "
                              "reach") from error
        self._is_local = self.own_address == target

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def hosts(self) -> bool:
        return self._server is not None

    def connect(self, on_read: Callable[[], None]) -> tuple[GuardedBackend, SignedStore]:
        """Host the store if this node has the endpoint's address, and connect to it twice: for
        requests, and for waiting until other nodes write. Raises one of `STORE_ERRORS` if the
        endpoint does not answer."""
        port_in_use = self._is_local and not self.hosts and not self._listen()
        limit = timedelta(seconds=CONNECT_S)
        before = sockets.connections()
        try:
            with _closed_after(CONNECT_S + 1.0, lambda: self._connections_since(before)):
                # This attempt fails quietly; torch's attempts would print stack traces.
                socket.create_connection((self._host, self._port), CONNECT_S).close()
                requests, waiting = (
                    TCPStore(self._host, self._port, is_master=False, timeout=limit,
                             wait_for_workers=False) for _ in range(2))
        except STORE_ERRORS as error:
            if port_in_use and not self._has_connected:
                raise ConfigError(
                    f"--rdzv-endpoint {self}: port {self._port} is in use by another program; "
                    "choose another port, the same on all nodes") from error
            raise
        waiting.set_timeout(timedelta(seconds=WAIT_S))
        self._has_connected = True
        signed = [SignedStore(store, self._secret, is_host=self.hosts, on_forged=self._on_forged)
                  for store in (requests, waiting)]
        backend = GuardedBackend(signed[0], on_read, self._connections_since(before))
        return backend, signed[1]

    def _connections_since(self, before: Collection[int]) -> set[int]:
        return {inode for inode, (_, peer_port) in sockets.connections().items()
                if inode not in before and peer_port == self._port}

    def _listen(self) -> bool:
        """Host the store; returns False if the port is in use."""
        try:
            self._server = host_store(self.own_address, self._port)[0]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False  # by another launcher on this machine, or by another program
            raise ConfigError(f"--rdzv-endpoint {self}: {error.strerror}; choose another port, "
                              "the same on all nodes") from error
        return True


@contextlib.contextmanager
def _closed_after(limit_s: float, connections: Callable[[], Collection[int]]) -> Iterator[None]:
    """Close connections (by inode) if the block takes longer: torch's timeouts don't end a wait for
    a listener that is silent, or whose host is cut off."""
    timer = threading.Timer(limit_s, lambda: sockets.shut_down(connections()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class GuardedBackend(C10dRendezvousBackend):
    """torch's backend, which calls `on_read` when torch reads the rendezvous state, about once a
    second, and closes the connections (`inodes`) of a silent store."""

    def __init__(
        self, store: SignedStore, on_read: Callable[[], None], inodes: Collection[int]
    ) -> None:
        self._on_read, self._inodes = on_read, inodes
        super().__init__(store, "trainer")

    def get_state(self) -> Any:
        state = super().get_state()
        self._on_read()
        return state

    def call(self, operation: str, *arguments: Any) -> Any:
        return self._call_store(operation, *arguments)

    def close(self) -> None:
        """Close the connections: a thread that waits for an answer gets an error."""
        sockets.shut_down(self._inodes)

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        # Private: the one place through which torch calls the store.
        with _closed_after(STORE_TIMEOUT_S, lambda: self._inodes):
            return super()._call_store(store_op, *args, **kwargs)
