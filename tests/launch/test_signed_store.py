"""What a stranger writes to the store of the rendezvous is neither used nor unpickled."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from launch.nodes.endpoint import GuardedBackend
from launch.nodes.signed_store import ForgedValue, SignedStore
from launch.rendezvous import host_store
from trainer.distributed import torch_private

SECRET = b"the secret of this job"
STATE = "torch.rendezvous.trainer"


class Neighbour:
    """A store on loopback: the host's connection, a node's, and a stranger's without the secret."""

    def __init__(self) -> None:
        self._server, self._port = host_store("127.0.0.1")
        self.forged: list[str] = []
        self.stranger = self._connect()
        self.host, self.node = self.sign(is_host=True), self.sign()

    def sign(self, secret: bytes = SECRET, *, is_host: bool = False) -> SignedStore:
        return SignedStore(self._connect(), secret, is_host=is_host,
                           on_forged=lambda: self.forged.append("forged"))

    def _connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)


@pytest.fixture
def at() -> Neighbour:
    return Neighbour()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def handler(at: Neighbour, store: SignedStore) -> dynamic.DynamicRendezvousHandler:
    backend = GuardedBackend(store, lambda: None, ())
    return dynamic.DynamicRendezvousHandler.from_backend(
        "trainer", store, backend, 1, 2, "127.0.0.1", keep_alive_interval=60)


def test_a_strangers_pickle_is_not_loaded_and_the_state_is_restored(
    at: Neighbour, tmp_path: Path
) -> None:
    attack = base64.b64encode(pickle.dumps(Payload(tmp_path / "ran"))).decode()
    first = handler(at, at.host)
    info = first.next_rendezvous()
    torch_private.stop_heartbeats(first)
    before = torch_private.rendezvous_state(first)

    at.stranger.set(STATE, attack)

    with pytest.raises(RendezvousConnectionError):  # a node that joins waits for the repair
        handler(at, at.node)
    while at.stranger.get(STATE) == attack.encode():  # torch reads it at most once a second
        assert first.num_nodes_waiting() == 0
    handler(at, at.node).num_nodes_waiting()
    assert torch_private.rendezvous_state(first).participants == before.participants
    assert (info.rank, info.world_size) == (0, 1)
    assert at.forged
    assert not (tmp_path / "ran").exists()


def put(store: Any, key: str, value: str | bytes) -> None:
    """Set a key, and wait until the store has it: `set` doesn't, but answers come in order."""
    store.set(key, value)
    store.get(key)


def test_only_the_newest_signed_value_of_its_key_is_returned(at: Neighbour) -> None:
    put(at.host, "a", "old")
    old = at.stranger.get("a")
    put(at.host, "a", b"new\0\xff")
    assert at.node.get("a") == b"new\0\xff"
    for attack in (b"new\0\xff", b"", b"x" * 100, old, bytes(40) + b"new"):
        put(at.stranger, "a", attack)
        assert at.node.get("a") == b"new\0\xff"
        assert at.stranger.get("a") != attack  # restored for nodes that join
        put(at.stranger, "a", attack)
        assert at.node.compare_set("a", "new", "x") == b"new\0\xff"
    at.stranger.delete_key("a")
    assert at.node.get("a") == b"new\0\xff"
    at.stranger.delete_key("a")
    assert at.node.compare_set("a", b"new\0\xff", "newer") == b"newer"
    assert at.host.get("a") == b"newer"

    put(at.stranger, "b", at.stranger.get("a"))
    with pytest.raises(ForgedValue):
        at.node.get("b")  # signed for another key
    assert not at.node.check(["a", "b"])
    assert at.node.check(["a"])


def test_only_the_host_overwrites_a_forged_value_before_it_has_seen_a_signed_one(
    at: Neighbour,
) -> None:
    put(at.stranger, "end", "0")
    other = at.sign(b"another secret, by mistake")
    for node in (at.node, other):
        with pytest.raises(ForgedValue):
            node.compare_set("end", "", "1")

    assert at.host.compare_set("end", "", "2") == b"2"
    assert at.node.compare_set("end", "", "3") == b"2"
    with pytest.raises(ForgedValue):
        other.get("end")


def test_torch_uses_it_under_a_prefix(at: Neighbour) -> None:
    ours, theirs = PrefixStore("round", at.host), PrefixStore("round", at.node)

    ours.multi_set(["a", "b"], ["1", "2"])

    assert theirs.multi_get(["a", "b"]) == [b"1", b"2"]
    assert theirs.compare_set("a", "1", "3") == b"3"
    assert ours.get("a") == b"3"
    put(at.stranger, "round/c", "1")
    assert not ours.check(["c"])
    assert at.host.check(["round/a"])
