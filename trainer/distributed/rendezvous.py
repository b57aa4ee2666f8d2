"""Rendezvous of the ranks of an attempt, through a store that may hold keys of older attempts.

Under torchrun one store may serve all attempts of a job, so a key in it may come from a process
that is dead by now. Each message of the protocol therefore answers a fresh random id:

1. each rank except 0 writes a fresh id to `hello/RANK`, which overwrites that of an older attempt;
2. rank 0 polls those keys and answers *each* new id: it writes the nonce of its attempt to
   `welcome/ID` (the first id that it reads may belong to a dead process);
3. a rank that reads its welcome writes `ack/NONCE/ID`;
4. when the newest id of every rank is acknowledged, rank 0 sets `go/NONCE`.

All later keys begin with the nonce, which no other attempt knows.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

RESULT_GRACE_S = 5.0  # extra time of a peer, so that rank 0's list of missing ranks comes first


def join_attempt(rank: int, size: int, timeout_s: float) -> tuple[str, Store]:
    """Collective. (nonce, store) of this attempt; no other attempt uses the store's keys. The
    launcher's variables decide who hosts the store: torchrun's agent or rank 0."""
    # A world size below -1 means "unknown". With the real size, a rank 0 that hosts the store would
    # wait for all ranks inside the store and could not name the missing ones.
    shared, _, _ = next(rendezvous("env://", rank, -2, timeout=timedelta(seconds=timeout_s)))
    nonce = handshake(PrefixStore("trainer/handshake", shared), rank=rank, size=size,
                      timeout_s=timeout_s)
    return nonce, PrefixStore(nonce, shared)


def handshake(store: Store, *, rank: int, size: int, timeout_s: float) -> str:
    """Collective. The nonce of this attempt. A TimeoutError on all ranks names those missing."""
    return _join(store, rank, size, timeout_s) if rank else _host(store, size, timeout_s)


def _host(store: Store, size: int, timeout_s: float) -> str:
    nonce = uuid.uuid4().hex
    answered: dict[int, str] = {}  # the newest id of each rank
    missing = set(range(1, size))

    def all_here() -> bool:
        for rank in sorted(missing):
            if not store.check([f"hello/{rank}"]):
                continue
            peer = store.get(f"hello/{rank}").decode()
            if answered.get(rank) != peer:
                store.set(f"welcome/{peer}", nonce)
                answered[rank] = peer
            if store.check([f"ack/{nonce}/{peer}"]):
                missing.remove(rank)
        return not missing

    complete = _poll(all_here, timeout_s)
    store.set(f"go/{nonce}", json.dumps(sorted(missing)))
    if not complete:
        # This process may host the store, so the present ranks must read the list before it exits.
        receipts = [f"read/{nonce}/{answered[rank]}"
                    for rank in range(1, size) if rank not in missing]
        _poll(lambda: all(store.check([key]) for key in receipts), RESULT_GRACE_S)
        raise TimeoutError(_missing_message(missing, size, timeout_s))
    return nonce


def _join(store: Store, rank: int, size: int, timeout_s: float) -> str:
    own = uuid.uuid4().hex
    store.set(f"hello/{rank}", own)
    if not _poll(lambda: store.check([f"welcome/{own}"]), timeout_s):
        raise TimeoutError(_missing_message([0], size, timeout_s))
    nonce = store.get(f"welcome/{own}").decode()
    store.set(f"ack/{nonce}/{own}", "")
    if not _poll(lambda: store.check([f"go/{nonce}"]), timeout_s + RESULT_GRACE_S):
        raise TimeoutError(f"rank 0 joined, but left before all {size} ranks had joined")
    missing = json.loads(store.get(f"go/{nonce}"))
    if missing:
        store.set(f"read/{nonce}/{own}", "")
        raise TimeoutError(_missing_message(missing, size, timeout_s))
    return nonce


def _poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `done` returns true; return whether it did in time. Blocking in the store would
    delay Python's signal handlers and lock its one connection."""
    start = time.monotonic()
    while not done():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        time.sleep(min(0.05, 0.001 + waited_s / 50))  # the ranks of a restart come at once
    return True


def _missing_message(ranks: Iterable[int], size: int, timeout_s: float) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return (f"rank{'s' * (',' in names)} {names} of {size} did not join within {timeout_s:g} s; "
            "look in the output of that process or host for the reason, or wait longer if it only "
            "starts slowly")
