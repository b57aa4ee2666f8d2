"""Rendezvous of ranks in a store that holds keys of older attempts; network connections."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from trainer.distributed import sockets
from trainer.distributed.rendezvous import handshake


def test_keys_of_an_older_attempt_do_not_disturb() -> None:
    store = HashStore()
    store.set("hello/1", "dead-before-it-was-answered")
    store.set("hello/2", "dead-after-its-welcome")
    store.set("welcome/dead-after-its-welcome", "old-nonce")
    store.set("ack/old-nonce/dead-after-its-welcome", "")
    store.set("go/old-nonce", "[]")
    nonces = [future.result() for future in _meet(store, range(3), 3)]
    assert len(set(nonces)) == 1
    assert nonces[0] != "old-nonce"


def test_rank_0_answers_a_new_id_after_it_has_answered_a_dead_one() -> None:
    store = HashStore()
    store.set("hello/1", "dead")
    with ThreadPoolExecutor() as threads:
        host = threads.submit(handshake, store, rank=0, size=2, timeout_s=100)
        store.wait(["welcome/dead"])  # rank 0 has answered the id of the dead rank
        nonce = handshake(store, rank=1, size=2, timeout_s=100)
        assert host.result() == nonce


def test_missing_ranks_are_named_on_all_others() -> None:
    store = HashStore()
    store.set("hello/2", "dead")
    for future in _meet(store, (0, 1), 4, timeout_s=2.0):
        with pytest.raises(TimeoutError, match="ranks 2, 3 of 4 did not join within 2 s"):
            future.result()


def test_a_missing_rank_0_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 of 2 did not join within 0\.2 s"):
        handshake(HashStore(), rank=1, size=2, timeout_s=0.2)


def test_the_interface_towards_an_address_is_that_of_the_route(
        monkeypatch: pytest.MonkeyPatch) -> None:
    assert sockets.interface_towards("127.0.0.1", 1) == "lo"

    def unknown(*_: object, **__: object) -> None:  # some name servers resolve any name
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert sockets.interface_towards("no-such-host.invalid", 1) is None


def test_a_shutdown_ends_only_the_given_connections() -> None:
    before = sockets.connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [_connect(server) for _ in range(2)]
        opened = sockets.connections().keys() - before.keys()
        ours = {number for number, (own_port, _) in sockets.connections().items()
                if own_port == pairs[0][0].getsockname()[1]}
        assert len(opened) == 4  # both ends are in this process; the server only listens
        sockets.shut_down(ours)
        assert pairs[0][1].recv(1) == b""
        pairs[1][0].sendall(b"x")
        assert pairs[1][1].recv(1) == b"x"
        for end in (*pairs[0], *pairs[1]):
            end.close()


def _connect(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    for end in (ours, theirs):
        end.settimeout(60)
    return ours, theirs


def _meet(store: Store, ranks: range | tuple[int, ...], size: int,
          timeout_s: float = 100.0) -> list[Future[str]]:
    with ThreadPoolExecutor(len(ranks)) as threads:  # waits at its end
        return [threads.submit(handshake, store, rank=rank, size=size, timeout_s=timeout_s)
                for rank in ranks]
