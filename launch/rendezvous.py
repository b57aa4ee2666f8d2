"""The rendezvous of a single node: a new store for each attempt, listening on loopback only."""

from __future__ import annotations

import socket
import uuid

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """Hosts the store in the launcher, so that it survives a killed rank.

    Each attempt has its own store on its own port: it cannot read keys of the previous attempt,
    and a remaining rank of that attempt cannot reach it.
    """

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # TCPStore itself would listen on all interfaces, regardless of the given address.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True
