"""How the ranks of one attempt find each other in a store that still holds older attempts' keys.

Under torchrun one store may serve all attempts of a job, so that a key which is read there may
come from a process that is dead by now. Each step here therefore answers a fresh random id:

1. each rank but 0 writes a fresh id to `hello/RANK`, over what an older attempt left there;
2. rank 0 reads those keys again and again, and answers *each* id that it has not yet answered
   under `welcome/ID` with the nonce of its attempt (the first id it reads may be a dead one's);
3. a rank that is welcomed says so under `ack/NONCE/ID`;
4. once the newest id of every rank is acknowledged, rank 0 sets `go/NONCE`.

What follows uses keys that begin with the nonce, which no other attempt knows.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

VERDICT_GRACE_S = 5.0  # rank 0's list of missing ranks should come before a peer's own time is up


def meet(rank: int, size: int, timeout_s: float) -> tuple[str, Store]:
    """Collective. (nonce, store) of this attempt: a store whose keys no other attempt sees.

    Who hosts it (torchrun's agent, or rank 0) is told by the launcher's variables.

    Raises:
        TimeoutError: names the ranks that never came.
        RuntimeError: no store answers at MASTER_ADDR:MASTER_PORT.
    """
    try:
        # A world size below -1 means "not told": else a hosting rank 0 would wait for all ranks
        # inside the store, and could not name those that never came.
        shared, _, _ = next(rendezvous("env://", rank, -2, timeout=timedelta(seconds=timeout_s)))
    except DistError as error:
        raise RuntimeError(f"rank {rank} of {size} has no store at MASTER_ADDR:MASTER_PORT, which "
                           f"the launcher or rank 0 hosts: {error}") from error
    nonce = handshake(PrefixStore("trainer/handshake", shared), rank=rank, size=size,
                      timeout_s=timeout_s)
    return nonce, PrefixStore(nonce, shared)


def handshake(store: Store, *, rank: int, size: int, timeout_s: float) -> str:
    """Collective. The nonce of this attempt (32 hex digits), equal on all ranks.

    Args:
        store: may hold keys of older attempts; this attempt's ranks must be alive at the same time.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        TimeoutError: names the ranks that never came.
        RuntimeError: the store's host does not answer.
    """
    if rank == 0:
        return _host(store, size, timeout_s)
    return _join(store, rank, size, timeout_s)


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

    came = _poll(all_here, timeout_s)
    store.set(f"go/{nonce}", json.dumps(sorted(missing)))
    if not came:
        # This process may host the store: those that came read the list before it goes away.
        here = [f"told/{nonce}/{answered[rank]}" for rank in range(1, size) if rank not in missing]
        _poll(lambda: all(store.check([key]) for key in here), VERDICT_GRACE_S)
        raise TimeoutError(_absent(missing, size, timeout_s))
    return nonce


def _join(store: Store, rank: int, size: int, timeout_s: float) -> str:
    own = uuid.uuid4().hex
    store.set(f"hello/{rank}", own)
    if not _poll(lambda: store.check([f"welcome/{own}"]), timeout_s):
        raise TimeoutError(_absent([0], size, timeout_s))
    nonce = store.get(f"welcome/{own}").decode()
    store.set(f"ack/{nonce}/{own}", "")
    if not _poll(lambda: store.check([f"go/{nonce}"]), timeout_s + VERDICT_GRACE_S):
        raise TimeoutError(f"rank 0 was here and left before all {size} ranks had come")
    missing = json.loads(store.get(f"go/{nonce}"))
    if missing:
        store.set(f"told/{nonce}/{own}", "")
        raise TimeoutError(_absent(missing, size, timeout_s))
    return nonce


def _poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `done` became true in time.

    Asks again and again instead of waiting in the store: a signal's Python handler runs only
    between two calls, and a client that waits locks its one connection. 5 ms between questions at
    first (a restart should not lose time here), then 50 ms.
    """
    start = time.monotonic()
    while not done():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        time.sleep(0.005 if waited_s < 2 else 0.05)
    return True


def _absent(ranks: Iterable[int], size: int, timeout_s: float) -> str:
    listed = sorted(ranks)
    who = f"rank {listed[0]}" if len(listed) == 1 else f"ranks {', '.join(map(str, listed))}"
    return (f"{who} of {size} did not come within {timeout_s:g} s; look in the output of that "
            "process or host for the reason, or wait longer if it only starts slowly")
