"""The rendezvous of several nodes: torch's c10d one, whose store may be lost and found again.

What the nodes agree on beside torch's own state stands in the same store, under `trainer/`:

- `launch`: names this launch on all nodes;
- `newest`: the nonce of the newest attempt; whose attempt it isn't stops;
- `stop`: a node was asked to stop the run;
- `end`: the exit code with which the run is over, for all nodes (the first to write it decides);
- `bye/NODE`: that node has seen how the run ended;
- and for one round of the rendezvous: `attempt` (its ranks' store, its nonce, the launch),
  `change` (the ranks are stopped because a node joins) and `stopped/NODE` (its ranks have left).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from launch.endpoint import SILENT_S, STORE_ERRORS, Backend, Endpoint, serve
from trainer.errors import EXIT_FAILURE, EXIT_STOPPED

KEEP_ALIVE_S, KEEP_ALIVE_TIMES = 1, 5
"""A node without a sign of life for 5 s is gone (torch's 5 s and 3 times would take longer; after
2 s a node that was merely slow was taken for dead, and both went on alone)."""

LAST_CALL_S = 1.0
"""How long a round waits for more nodes once the least number is there (torch: 30 s)."""

RETRY_S, FAREWELL_S = 0.3, 8.0


class RunOver(Exception):
    """The run ends on this node, with this exit code.

    Attributes:
        why: for people; empty where it was said before.
    """

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.why = why


@dataclasses.dataclass(frozen=True)
class Change:
    """Why the ranks can't go on as they are.

    Attributes:
        kind: "join": a node waits, the group is whole. "lost": a node or the store is gone.
            "stale": a newer attempt has begun without this node.
    """

    kind: str
    why: str


class NodesRendezvous(RendezvousHandler):
    """Meets the other nodes at an endpoint, again and again until the run is over.

    Args:
        host, port: where the store is; the node whose address that is hosts it.
        rejoin_timeout_s: how long to try while the store doesn't answer, or too few nodes come.
        stopped: whether this node was asked to stop.
        say: shows a line.

    Attributes:
        stop_asked: whether some node was asked to stop.
        change: why the ranks can't go on as they are, once `num_nodes_waiting` has found it.
        members: the nodes of this round.

    Raises:
        ConfigError: the host's name means nothing, or nothing leads there.
    """

    def __init__(
        self, host: str, port: int, *, min_nodes: int, max_nodes: int, rejoin_timeout_s: float,
        stopped: Callable[[], bool], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.stop_asked = False
        self.change: Change | None = None
        self.members: frozenset[tuple[str, int]] = frozenset()
        self._endpoint = Endpoint(host, port)
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._rejoin_timeout_s = rejoin_timeout_s
        self._stopped, self._say = stopped, say
        self._launch_id = uuid.uuid4().hex
        self._nonce = ""
        self._joining = False
        self._attempt_server: TCPStore | None = None
        self._handler: DynamicRendezvousHandler | None = None
        self._backend: Backend | None = None
        self._run: Callable[..., Any] = _lost
        self._round: Store = _LOST
        # torch's agents would share a store that a node which comes later knows nothing of.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        for module in ("dynamic_rendezvous", "c10d_rendezvous_backend"):  # we say it ourselves
            name = f"torch.distributed.elastic.rendezvous.{module}"
            logging.getLogger(name).setLevel(logging.ERROR)

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True  # the attempt's own, in the launcher of its first node

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round, however often the store is lost meanwhile.

        Raises:
            RunOver: it is over, or this node was asked to stop, or the time is up.
            ConfigError: something else listens at the endpoint.
        """
        began_s, said = time.monotonic(), False
        self.change, self._joining = None, True
        while True:
            self._refuse_to_wait()
            try:
                handler = self._handler or self._connect()
                info = handler.next_rendezvous()
                self._joining = False
                return self._open_attempt(handler, info)
            except RendezvousTimeoutError as error:
                raise RunOver(EXIT_FAILURE, f"fewer than {self._min_nodes} nodes came within "
                              f"--rejoin-timeout {self._rejoin_timeout_s:g} s") from error
            except STORE_ERRORS:  # or a peer has died in the middle of it
                self._joining = True
                self._drop()
            waited_s = time.monotonic() - began_s
            if waited_s > self._rejoin_timeout_s:
                raise RunOver(EXIT_FAILURE, f"{self._place} did not answer within "
                              f"--rejoin-timeout {self._rejoin_timeout_s:g} s")
            if not said and waited_s > SILENT_S:
                said = True
                self._say(f"{self._place} doesn't answer; trying on for "
                          f"{self._rejoin_timeout_s:g} s (--rejoin-timeout)")
            time.sleep(RETRY_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """`end` does it."""

    def num_nodes_waiting(self) -> int:
        """1 if the ranks can't go on as they are, else 0: torch's agent restarts them for it."""
        self.change = self.change or self._find_change()
        return int(self.change is not None)

    def get_run_id(self) -> str:
        return self._launch_id

    def shutdown(self) -> bool:
        return True

    def begin_change(self) -> None:
        """Before this node stops its ranks for a node that joins: all are to restart."""
        _ask(lambda: self._round.set("trainer/change", "1"))

    def is_changing(self) -> bool:
        """Whether some node has stopped the ranks of this round because a node joins."""
        return bool(_ask(lambda: self._round.check(["trainer/change"])))

    def ask_stop(self) -> None:
        """Tell the other nodes that this one was asked to stop."""
        if not self.stop_asked:
            self.stop_asked = True
            _ask(lambda: self._run("set", "trainer/stop", "1"))

    def end(self, code: int) -> int:
        """The run is over, with this exit code; returns that of the node that said so first."""
        told = _ask(lambda: self._run("compare_set", "trainer/end", "", str(code)))
        return code if told is None else int(told)

    def ended(self) -> int | None:
        """The exit code of the run, if it is over on some node."""
        if not _ask(lambda: self._run("check", ["trainer/end"])):
            return None
        return int(_ask(lambda: self._run("get", "trainer/end")) or EXIT_FAILURE)

    def lacks_member(self, *, all_stopped: bool = False) -> bool:
        """Whether a node of this round is gone, or is found to be while we wait.

        Args:
            all_stopped: don't wait any longer once the ranks of each node have stopped, too.
        """
        _ask(lambda: self._round.set(f"trainer/stopped/{_name(self._me)}", "1"))
        stopped = [f"trainer/stopped/{_name(node)}" for node in self.members]
        deadline_s = time.monotonic() + KEEP_ALIVE_S * KEEP_ALIVE_TIMES + 1.0
        while not self.num_nodes_waiting() or (self.change and self.change.kind == "join"):
            self.change = None
            whole = all_stopped and _ask(lambda: self._round.check(stopped))
            if whole or self.ended() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(RETRY_S)
        return True

    def farewell(self) -> None:
        """At the end: the store's host stays until the others have seen how the run ended."""
        self._joining = False
        if not self._endpoint.hosts:
            _ask(lambda: self._run("set", f"trainer/bye/{_name(self._me)}", "1"))
            return
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s:
            state = _ask(self._state)
            others = {(n.addr, n.pid) for n in state.last_heartbeats} if state else set()
            keys = [f"trainer/bye/{_name(node)}" for node in others - {self._me}]
            if not keys or _ask(partial(self._run, "check", keys)):
                return
            time.sleep(RETRY_S)

    @property
    def _place(self) -> str:
        return f"the rendezvous at {self._endpoint}"

    @property
    def _me(self) -> tuple[str, int]:
        return self._endpoint.own, os.getpid()

    def _connect(self) -> DynamicRendezvousHandler:
        self._backend, waiting = self._endpoint.connect(self._look)
        if not self._nonce:
            self._say(f"meeting {self._min_nodes} to {self._max_nodes} nodes at {self._endpoint}")
        self._run = self._backend.ask
        if self._nonce:  # where the store is new, the launch is the one that this node knows
            self._run("set", "trainer/launch", self._launch_id)
        else:
            self._run("compare_set", "trainer/launch", "", self._launch_id)
        self._handler = DynamicRendezvousHandler.from_backend(
            "trainer", waiting, self._backend, self._min_nodes, self._max_nodes, self._me[0],
            RendezvousTimeout(join=timedelta(seconds=self._rejoin_timeout_s),
                              last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=KEEP_ALIVE_S, keep_alive_max_attempt=KEEP_ALIVE_TIMES,
        )  # fmt: skip
        return self._handler

    def _open_attempt(
        self, handler: DynamicRendezvousHandler, info: RendezvousInfo
    ) -> RendezvousInfo:
        """A store and a nonce for the ranks of this round, from its first node for all."""
        self._round = info.store
        self._attempt_server = None
        if info.rank == 0:
            address = self._me[0]
            self._attempt_server, port = serve(address)
            attempt = {"address": address, "port": port, "nonce": uuid.uuid4().hex,
                       "launch": self._run("get", "trainer/launch").decode()}  # fmt: skip
            self._run("set", "trainer/newest", attempt["nonce"])
            self._round.set("trainer/attempt", json.dumps(attempt))
        told = json.loads(self._round.get("trainer/attempt"))
        self._nonce, self._launch_id = told["nonce"], told["launch"]
        state = handler._state_holder.state
        self.members = frozenset((node.addr, node.pid) for node in state.participants)
        return RendezvousInfo(info.store, info.rank, info.world_size,
                              RendezvousStoreInfo(told["address"], told["port"]))

    def _drop(self) -> None:
        """The store is lost: end the connections with it."""
        if self._backend is not None:
            self._backend.close()
        if self._handler is not None:
            self._handler._stop_heartbeats()  # its thread could not do it by itself
        self._handler = self._backend = None
        self._run, self._round = _lost, _LOST

    def _state(self) -> Any:
        if self._handler is None:
            raise RendezvousConnectionError(f"{self._place} is lost")
        self._handler.num_nodes_waiting()  # reads it, at most once a second
        return self._handler._state_holder.state

    def _find_change(self) -> Change | None:
        try:
            state = self._state()
            newest = self._run("get", "trainer/newest").decode()
        except STORE_ERRORS:
            self._drop()
            return Change("lost", f"{self._place} doesn't answer any more")
        if newest != self._nonce:
            return Change("stale", "the other nodes have gone on without this one")
        present = {(node.addr, node.pid) for node in state.participants}
        if self._me not in present:
            return Change("lost", "the other nodes have taken this one for gone")
        if gone := sorted(self.members - present):
            return Change("lost", f"node {', '.join(addr for addr, _ in gone)} is gone")
        if state.wait_list:
            names = sorted({node.addr for node in state.wait_list})
            return Change("join", f"node {', '.join(names)} joins")
        return None

    def _look(self) -> None:
        self.stop_asked = self.stop_asked or self._run("check", ["trainer/stop"])
        if self._joining and threading.current_thread() is threading.main_thread():
            if self._run("check", ["trainer/end"]):
                raise RunOver(int(self._run("get", "trainer/end")), "the run is over elsewhere")
            self._refuse_to_wait()

    def _refuse_to_wait(self) -> None:
        if self._stopped():
            self.ask_stop()  # the others would wait for this node
        if self.stop_asked:
            raise RunOver(EXIT_STOPPED)


def _lost(*_: Any) -> Any:
    raise RendezvousConnectionError("the rendezvous is lost")


class _Lost:  # in place of a store
    check = get = set = staticmethod(_lost)


_LOST: Any = _Lost()


def _ask(what: Callable[[], Any]) -> Any:
    """What the store answers; None if it is lost."""
    try:
        return what()
    except STORE_ERRORS:
        return None


def _name(node: tuple[str, int]) -> str:
    return f"{node[0]}_{node[1]}"
