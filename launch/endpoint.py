"""The endpoint where nodes meet: who hosts its store, a connection with it, and its silence."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from trainer import network
from trainer.errors import ConfigError

SILENT_S = 4.0
"""A store that hasn't answered for so long is lost: before others can take this node for gone."""

GUARD_S = 0.3
CONNECT_S = 3.0
WAIT_S = 5.0
"""How long to wait in the store for what another node is to write."""

STORE_ERRORS = (RendezvousError, RuntimeError, TimeoutError, OSError)
"""What torch's rendezvous and stores raise (the latter's own errors are RuntimeErrors)."""


class Endpoint:
    """HOST:PORT, and the store there, hosted by the node whose address that is.

    Attributes:
        own: this node's address on the way there.
        hosts: whether this process hosts the store.

    Raises:
        ConfigError: the host's name means nothing, or nothing leads there.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._server: TCPStore | None = None  # serves as long as it lives
        self._met = False
        try:
            ways = network.ways_to(host, port)
        except OSError as error:
            raise ConfigError(f"--rdzv-endpoint {self}: {error.strerror or error}") from error
        if not ways:
            raise ConfigError(f"--rdzv-endpoint {self}: no route leads there from this machine")
        self.own, target = ways[0]
        self._is_here = self.own == target

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def hosts(self) -> bool:
        return self._server is not None

    def connect(self, look: Callable[[], None]) -> tuple[Backend, TCPStore]:
        """Host the store where that is this node's part, and connect with it, twice: to ask what is
        answered at once, and to wait for what others write.

        Raises:
            ConfigError: something else listens at the endpoint.
            RuntimeError, TimeoutError: nobody answers.
        """
        taken = self._is_here and not self.hosts and not self._listen()
        limit = timedelta(seconds=CONNECT_S)
        before = network.connections()
        # What listens there may accept and say nothing, for which torch has no limit.
        late = threading.Timer(CONNECT_S + 1.0, lambda: network.shut_down(self._ours(before)))
        late.start()
        try:
            # Quiet, where torch's own attempts fill the screen with traces.
            socket.create_connection((self._host, self._port), CONNECT_S).close()
            asking, waiting = (
                TCPStore(self._host, self._port, is_master=False, wait_for_workers=False,
                         timeout=limit) for _ in range(2)
            )  # fmt: skip
        except STORE_ERRORS as error:
            if taken and not self._met:
                raise ConfigError(
                    f"--rdzv-endpoint {self}: port {self._port} is in use by something else; "
                    "choose another one, the same on all nodes") from error
            raise
        finally:
            late.cancel()
        waiting.set_timeout(timedelta(seconds=WAIT_S))
        self._met = True
        return Backend(asking, look=look, inodes=self._ours(before)), waiting

    def _ours(self, before: Collection[int]) -> set[int]:
        """The connections with the endpoint, but for those from before."""
        return {inode for inode, found in network.connections().items()
                if inode not in before and found.peer_port == self._port}

    def _listen(self) -> bool:
        """Host the store, at the endpoint's address only; False if its port is in use."""
        try:
            self._server = serve(self.own, self._port)[0]
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False  # by another launcher of this machine, or by something else
            raise ConfigError(f"--rdzv-endpoint {self}: {error.strerror}; choose another port, "
                              "the same on all nodes") from error
        return True


def serve(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Host a store, and its port (0: a free one). It lives as long as the object.

    TCPStore itself would listen on all interfaces, whatever address it is given.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False,
                    master_listen_fd=listener.detach()), port


class Backend(C10dRendezvousBackend):
    """torch's, which also looks at what else is to be known, and ends a silent store's connections.

    A call of a store whose host is cut off blocks until the network is back, whatever its timeout.

    Args:
        look: called whenever torch reads its state, about once a second.
        inodes: of the connections to the store.
    """

    def __init__(
        self, store: TCPStore, *, look: Callable[[], None], inodes: Collection[int]
    ) -> None:
        self._look, self._inodes = look, inodes
        self._asked_s: dict[int, float] = {}  # thread → since when it has waited for an answer
        self._closed = threading.Event()
        threading.Thread(target=self._guard, name="store-guard", daemon=True).start()
        super().__init__(store, "trainer")

    def get_state(self) -> Any:
        state = super().get_state()
        self._look()
        return state

    def ask(self, operation: str, *arguments: Any) -> Any:
        """An operation of the store that is answered at once.

        Raises:
            RendezvousConnectionError: it is lost.
        """
        return self._call_store(operation, *arguments)

    def close(self) -> None:
        """Whoever waits for an answer gets an error."""
        self._closed.set()
        network.shut_down(self._inodes)

    def _guard(self) -> None:
        while not self._closed.wait(GUARD_S):
            now_s = time.monotonic()
            if now_s - min(list(self._asked_s.values()), default=now_s) > SILENT_S:
                self.close()

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        me = threading.get_ident()
        self._asked_s[me] = time.monotonic()
        try:
            return super()._call_store(store_op, *args, **kwargs)
        finally:
            del self._asked_s[me]
