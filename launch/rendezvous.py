"""The rendezvous of a single node: a new store for each attempt, listening on loopback only."""

from __future__ import annotations

import socket
import uuid

from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous as elastic

LOOPBACK = "127.0.0.1"


def host_store(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """Host a store on `port` (0: a free one) as long as the object exists; returns it and its port.
    It gets a listening socket: TCPStore itself would listen on all interfaces."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False,
                    master_listen_fd=listener.detach()), port


class LauncherRendezvous(elastic.RendezvousHandler):
    """A rendezvous whose launchers host the store of each attempt, so that it survives a rank."""

    def __init__(self) -> None:
        self._launch_id = uuid.uuid4().hex

    def get_backend(self) -> str:
        return "c10d"  # only a label in torch's events

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # no node joins after the end

    def get_run_id(self) -> str:
        return self._launch_id

    def shutdown(self) -> bool:
        return True


class LoopbackRendezvous(LauncherRendezvous):
    """One node. Each attempt has its own store on its own port: it cannot read keys of the previous
    attempt, and a remaining rank of that attempt cannot reach it."""

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        self._store, port = host_store(LOOPBACK)
        return elastic.RendezvousInfo(
            self._store, 0, 1, elastic.RendezvousStoreInfo(LOOPBACK, port))

    def num_nodes_waiting(self) -> int:
        return 0
