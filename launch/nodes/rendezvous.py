"""The rendezvous of several nodes: torch's c10d rendezvous, which survives the loss of its store.

Besides torch's state, the store contains what the nodes agree on, under `trainer/`:

- `launch`: the id of this launch on all nodes;
- `newest`: the nonce of the newest attempt; a node with another nonce stops its ranks;
- `stop`: a node received a stop request;
- `end`: the exit code of the run on all nodes, set by the first node that writes it;
- `bye/NODE`: this node has read the exit code;
- for one round of the rendezvous: `attempt` (address of its ranks' store, nonce, launch id),
  `change` (the ranks are stopped because a node joins) and `stopped/NODE` (its ranks have exited).
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

from launch.nodes.endpoint import (
    STORE_ERRORS,
    STORE_TIMEOUT_S,
    Endpoint,
    GuardedBackend,
    host_store,
)
from trainer.errors import EXIT_FAILURE, EXIT_STOPPED

KEEP_ALIVE_S, KEEP_ALIVE_TIMES = 1, 5
"""A node without heartbeats for 5 s counts as dead. torch's defaults (3 times 5 s) take longer.
With 2 s, a slow node was declared dead, and both nodes continued alone."""

LAST_CALL_S = 1.0
"""How long a round waits for more nodes once the minimum has joined (torch: 30 s)."""

RETRY_S, LINGER_S = 0.3, 8.0


class RunEnded(Exception):
    """The run ends on this node, with this exit code.

    Attributes:
        reason: message for the user; empty if it has been printed before.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class MembershipChange:
    """A change of the set of nodes that requires a restart of the ranks.

    Attributes:
        kind: "join": a node waits to join, the group is complete. "lost": a node or the store is
            gone. "stale": a newer attempt has begun without this node.
        reason: message for the user.
    """

    kind: str
    reason: str


class NodesRendezvous(RendezvousHandler):
    """Repeated rendezvous of the nodes at one endpoint, until the run ends.

    Args:
        host, port: endpoint of the store; the node with this address hosts it.
        min_nodes, max_nodes: number of nodes that a round needs, and accepts.
        rejoin_timeout_s: time limit while the store does not answer or too few nodes join.
        stopped: returns whether this node received a stop request.
        print_line: prints a line for the user.

    Attributes:
        stop_requested: whether any node received a stop request.
        change: the change that requires a restart, once `num_nodes_waiting` has detected it.
        members: address and pid of each node of this round.

    Raises:
        ConfigError: the host name cannot be resolved, or there is no route to it.
    """

    def __init__(
        self, host: str, port: int, *, min_nodes: int, max_nodes: int, rejoin_timeout_s: float,
        stopped: Callable[[], bool], print_line: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.stop_requested = False
        self.change: MembershipChange | None = None
        self.members: frozenset[tuple[str, int]] = frozenset()
        self._endpoint = Endpoint(host, port)
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._rejoin_timeout_s = rejoin_timeout_s
        self._stopped, self._say = stopped, print_line
        self._launch_id = uuid.uuid4().hex
        self._nonce = ""
        self._joining = False
        self._attempt_server: TCPStore | None = None
        self._handler: DynamicRendezvousHandler | None = None
        self._backend: GuardedBackend | None = None
        self._call: Callable[..., Any] = _raise_lost
        self._round: Store = _LOST_STORE
        # Otherwise torch's agents share one store, which a node that joins later does not know.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The launcher prints its own messages in place of torch's.
        for module in ("dynamic_rendezvous", "c10d_rendezvous_backend"):
            name = f"torch.distributed.elastic.rendezvous.{module}"
            logging.getLogger(name).setLevel(logging.ERROR)

    def get_backend(self) -> str:
        return "c10d"

    @property
    def use_agent_store(self) -> bool:
        return True  # one for each attempt, in the launcher of its first node

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; reconnect as often as the store is lost meanwhile.

        Raises:
            RunEnded: the run has ended, a stop was requested, or `rejoin_timeout_s` has passed.
            ConfigError: another program listens at the endpoint.
        """
        began_s, warned = time.monotonic(), False
        self.change, self._joining = None, True
        while True:
            self._raise_if_stopped()
            try:
                handler = self._handler or self._connect()
                info = handler.next_rendezvous()
                self._joining = False
                return self._open_attempt(handler, info)
            except RendezvousTimeoutError as error:
                raise RunEnded(EXIT_FAILURE, f"fewer than {self._min_nodes} nodes joined within "
                               f"--rejoin-timeout {self._rejoin_timeout_s:g} s") from error
            except STORE_ERRORS:  # or a peer has died during the rendezvous
                self._joining = True
                self._drop_connections()
            waited_s = time.monotonic() - began_s
            if waited_s > self._rejoin_timeout_s:
                raise RunEnded(EXIT_FAILURE, f"{self._description} did not answer within "
                               f"--rejoin-timeout {self._rejoin_timeout_s:g} s")
            if not warned and waited_s > STORE_TIMEOUT_S:
                warned = True
                self._say(f"{self._description} does not answer; retrying for "
                          f"{self._rejoin_timeout_s:g} s (--rejoin-timeout)")
            time.sleep(RETRY_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: `end` publishes the end of the run."""

    def take_change(self) -> MembershipChange | None:
        """Return the change of the members that was found, and forget it."""
        change, self.change = self.change, None
        return change

    def num_nodes_waiting(self) -> int:
        """1 if a change requires a restart, else 0. torch's agent restarts the ranks if not 0."""
        self.change = self.change or self._find_change()
        return int(self.change is not None)

    def get_run_id(self) -> str:
        return self._launch_id

    def shutdown(self) -> bool:
        return True

    def begin_change(self) -> None:
        """Announce that this node stops its ranks because a node joins, so all nodes restart."""
        _or_none(lambda: self._round.set("trainer/change", "1"))

    def is_changing(self) -> bool:
        """Whether any node has stopped its ranks of this round because a node joins."""
        return bool(_or_none(lambda: self._round.check(["trainer/change"])))

    def request_stop(self) -> None:
        """Publish the stop request of this node to the other nodes."""
        if not self.stop_requested:
            self.stop_requested = True
            _or_none(lambda: self._call("set", "trainer/stop", "1"))

    def end(self, code: int) -> int:
        """End the run on all nodes; returns the exit code of the first node that ended it."""
        first = _or_none(lambda: self._call("compare_set", "trainer/end", "", str(code)))
        return code if first is None else int(first)

    def ended(self) -> int | None:
        """The exit code of the run, or None if no node has ended it."""
        if not _or_none(lambda: self._call("check", ["trainer/end"])):
            return None
        return int(_or_none(lambda: self._call("get", "trainer/end")) or EXIT_FAILURE)

    def has_lost_member(self, *, all_stopped: bool = False) -> bool:
        """Whether a node of this round is lost; waits until a loss would have been detected.

        Args:
            all_stopped: return early once the ranks of every node have stopped, too.
        """
        _or_none(lambda: self._round.set(f"trainer/stopped/{_key(self._me)}", "1"))
        stopped = [f"trainer/stopped/{_key(node)}" for node in self.members]
        deadline_s = time.monotonic() + KEEP_ALIVE_S * KEEP_ALIVE_TIMES + 1.0
        while not self.num_nodes_waiting() or (self.change and self.change.kind == "join"):
            self.change = None
            complete = all_stopped and _or_none(lambda: self._round.check(stopped))
            if complete or self.ended() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(RETRY_S)
        return True

    def leave(self) -> None:
        """At the end, keep hosting the store until the other nodes have read the exit code."""
        self._joining = False
        if not self._endpoint.hosts:
            _or_none(lambda: self._call("set", f"trainer/bye/{_key(self._me)}", "1"))
            return
        deadline_s = time.monotonic() + LINGER_S
        while time.monotonic() < deadline_s:
            state = _or_none(self._state)
            others = {(n.addr, n.pid) for n in state.last_heartbeats} if state else set()
            keys = [f"trainer/bye/{_key(node)}" for node in others - {self._me}]
            if not keys or _or_none(partial(self._call, "check", keys)):
                return
            time.sleep(RETRY_S)

    @property
    def _description(self) -> str:
        return f"the rendezvous at {self._endpoint}"

    @property
    def _me(self) -> tuple[str, int]:
        return self._endpoint.own_address, os.getpid()

    def _connect(self) -> DynamicRendezvousHandler:
        self._backend, waiting = self._endpoint.connect(self._check_requests)
        if not self._nonce:
            self._say(f"waiting for {self._min_nodes} to {self._max_nodes} nodes "
                      f"at {self._endpoint}")
        self._call = self._backend.call
        if self._nonce:  # a new store: the launch keeps the id that this node knows
            self._call("set", "trainer/launch", self._launch_id)
        else:
            self._call("compare_set", "trainer/launch", "", self._launch_id)
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
        """Publish or read the store address and the nonce of this round's attempt.

        The first node of the round creates both.
        """
        self._round = info.store
        self._attempt_server = None
        if info.rank == 0:
            address = self._me[0]
            self._attempt_server, port = host_store(address)
            attempt = {"address": address, "port": port, "nonce": uuid.uuid4().hex,
                       "launch": self._call("get", "trainer/launch").decode()}  # fmt: skip
            self._call("set", "trainer/newest", attempt["nonce"])
            self._round.set("trainer/attempt", json.dumps(attempt))
        attempt = json.loads(self._round.get("trainer/attempt"))
        self._nonce, self._launch_id = attempt["nonce"], attempt["launch"]
        state = handler._state_holder.state
        self.members = frozenset((node.addr, node.pid) for node in state.participants)
        return RendezvousInfo(info.store, info.rank, info.world_size,
                              RendezvousStoreInfo(attempt["address"], attempt["port"]))

    def _drop_connections(self) -> None:
        """Close the connections to a store that is lost."""
        if self._backend is not None:
            self._backend.close()
        if self._handler is not None:
            self._handler._stop_heartbeats()  # its thread cannot stop by itself
        self._handler = self._backend = None
        self._call, self._round = _raise_lost, _LOST_STORE

    def _state(self) -> Any:
        if self._handler is None:
            raise RendezvousConnectionError(f"{self._description} is lost")
        self._handler.num_nodes_waiting()  # reads the state, at most once a second
        return self._handler._state_holder.state

    def _find_change(self) -> MembershipChange | None:
        try:
            state = self._state()
            newest = self._call("get", "trainer/newest").decode()
        except STORE_ERRORS:
            self._drop_connections()
            return MembershipChange("lost", f"{self._description} no longer answers")
        if newest != self._nonce:
            return MembershipChange("stale", "the other nodes have continued without this one")
        present = {(node.addr, node.pid) for node in state.participants}
        if self._me not in present:
            return MembershipChange("lost", "the other nodes have declared this one lost")
        if gone := sorted(self.members - present):
            return MembershipChange("lost", f"node {', '.join(addr for addr, _ in gone)} is gone")
        if state.wait_list:
            names = sorted({node.addr for node in state.wait_list})
            return MembershipChange("join", f"node {', '.join(names)} joins")
        return None

    def _check_requests(self) -> None:
        self.stop_requested = self.stop_requested or self._call("check", ["trainer/stop"])
        if self._joining and threading.current_thread() is threading.main_thread():
            if self._call("check", ["trainer/end"]):
                code = int(self._call("get", "trainer/end"))
                raise RunEnded(code, "another node has ended the run")
            self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stopped():
            self.request_stop()  # otherwise the other nodes wait for this one
        if self.stop_requested:
            raise RunEnded(EXIT_STOPPED)


def _raise_lost(*_: Any) -> Any:
    raise RendezvousConnectionError("the rendezvous is lost")


class _LostStore:
    """Takes the place of a store that is lost."""

    check = get = set = staticmethod(_raise_lost)


_LOST_STORE: Any = _LostStore()


def _or_none(operation: Callable[[], Any]) -> Any:
    """The result of a store operation; None if the store is lost."""
    try:
        return operation()
    except STORE_ERRORS:
        return None


def _key(node: tuple[str, int]) -> str:
    return f"{node[0]}_{node[1]}"
