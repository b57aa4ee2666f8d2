"""The rendezvous of several nodes: torch's c10d rendezvous, which survives the loss of its store.

Every value is signed (`SignedStore`). Besides torch's state, the store contains, under `trainer/`:

- `launch`: the id of this launch on all nodes;
- `newest`: the nonce of the newest attempt; a node with another nonce stops its ranks;
- `stop`: a node received a stop request;
- `end`: the exit code of the run on all nodes, set by the first node that writes it;
- `bye/NODE`: this node has read the exit code;
- `change/NONCE`: the ranks of this attempt are stopped because a node joins;
- `stopped/NONCE/NODE`: this node's ranks of this attempt have exited;
- `attempt`, in the store of one round: address of the ranks' store, nonce, launch id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous as elastic
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from launch.nodes.endpoint import STORE_ERRORS, STORE_TIMEOUT_S, Endpoint, GuardedBackend
from launch.options import SECRET, Options
from launch.rendezvous import LauncherRendezvous, host_store
from trainer.distributed import torch_private
from trainer.errors import EXIT_FAILURE, EXIT_STOPPED

KEEP_ALIVE_S, KEEP_ALIVE_TIMES = 1, 5
"""A node without heartbeats for 5 s counts as dead. torch's defaults (3 times 5 s) take longer.
With 2 s, a slow node was declared dead, and both nodes continued alone."""

LAST_CALL_S = 1.0  # how long a round waits for more nodes once the minimum has joined (torch: 30 s)
RETRY_S, LINGER_S = 0.3, 8.0


class RunEnded(Exception):
    """The run ends on this node with this exit code and message (empty: it has been printed)."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclasses.dataclass(frozen=True)
class MembershipChange:
    """A change of the set of nodes that requires a restart of the ranks."""

    kind: str
    """`join`: a node waits to join, the group is complete. `lost`: a node or the store is gone.
    `stale`: a newer attempt has begun without this node."""
    reason: str


class NodesRendezvous(LauncherRendezvous):
    """Repeated rendezvous of the nodes at one endpoint, until the run ends. `secret` signs the
    values in the store. `stopped`: whether this node received a stop request."""

    def __init__(
        self, options: Options, secret: bytes, stopped: Callable[[], bool],
        print_line: Callable[[str], None],
    ) -> None:
        super().__init__()
        assert options.rdzv_endpoint is not None
        self.stop_requested = False  # whether any node received a stop request
        self.members: frozenset[tuple[str, int]] = frozenset()  # address and pid of each node
        self._endpoint = Endpoint(*options.rdzv_endpoint, secret, self._report_forged)
        self._min_nodes, self._max_nodes = options.nnodes
        self._timeout_s = options.rejoin_timeout
        self._stopped, self._print_line = stopped, print_line
        self._me = (self._endpoint.own_address, os.getpid())
        self._description = f"the rendezvous at {self._endpoint}"
        self._nonce = ""
        self._forged = ""  # the message about values that are not signed, once it is printed
        self._joining = False
        self._attempt_server: TCPStore | None = None
        self._handler: dynamic.DynamicRendezvousHandler | None = None
        self._backend: GuardedBackend | None = None
        # Otherwise torch's agents share one store, which a node that joins later does not know.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # The launcher prints its own messages in place of torch's.
        for module in ("dynamic_rendezvous", "c10d_rendezvous_backend"):
            name = f"torch.distributed.elastic.rendezvous.{module}"
            logging.getLogger(name).setLevel(logging.ERROR)

    def next_rendezvous(self) -> elastic.RendezvousInfo:
        """Join the next round; reconnect as often as the store is lost meanwhile. Raises `RunEnded`
        if the run has ended, a stop was requested, or `--rejoin-timeout` has passed."""
        began_s, warned = time.monotonic(), False
        self._joining = True
        while True:
            self._raise_if_stopped()
            try:
                handler = self._handler or self._connect()
                info = handler.next_rendezvous()
                self._joining = False
                return self._open_attempt(handler, info)
            except elastic.RendezvousTimeoutError as error:
                raise RunEnded(EXIT_FAILURE, f"fewer than {self._min_nodes} nodes joined within "
                               f"--rejoin-timeout {self._timeout_s:g} s") from error
            except STORE_ERRORS:  # or a peer has died during the rendezvous
                self._joining = True
                self._drop_connections()
            waited_s = time.monotonic() - began_s
            if waited_s > self._timeout_s:
                raise RunEnded(EXIT_FAILURE, self._forged or f"{self._description} did not answer "
                               f"within --rejoin-timeout {self._timeout_s:g} s")
            if not warned and waited_s > STORE_TIMEOUT_S:
                warned = True
                self._print_line(f"{self._description} does not answer; retrying for "
                                 f"{self._timeout_s:g} s (--rejoin-timeout)")
            time.sleep(RETRY_S)

    def num_nodes_waiting(self) -> int:
        """1 if a change requires a restart, else 0. torch's agent restarts the ranks if not 0."""
        return int(self.find_change() is not None)

    def begin_change(self) -> None:
        """Announce that this node stops its ranks because a node joins, so all nodes restart."""
        self._try("set", f"trainer/change/{self._nonce}", "1")

    def is_changing(self) -> bool:
        """Whether any node has stopped its ranks of this round because a node joins."""
        return bool(self._try("check", [f"trainer/change/{self._nonce}"]))

    def request_stop(self) -> None:
        if not self.stop_requested:
            self.stop_requested = True
            self._try("set", "trainer/stop", "1")

    def end(self, code: int) -> int:
        """End the run on all nodes; returns the exit code of the first node that ended it."""
        first = self._try("compare_set", "trainer/end", "", str(code))
        return code if first is None else int(first)

    def ended(self) -> int | None:
        """The exit code of the run, or None if no node has ended it."""
        if not self._try("check", ["trainer/end"]):
            return None
        return int(self._try("get", "trainer/end") or EXIT_FAILURE)

    def has_lost_member(self, *, all_stopped: bool = False) -> bool:
        """Whether a node of this round is lost; waits until a loss would have been detected. With
        `all_stopped`, returns early once the ranks of every node have stopped, too."""
        stopped = [f"trainer/stopped/{self._nonce}/{_key(node)}" for node in self.members]
        self._try("set", f"trainer/stopped/{self._nonce}/{_key(self._me)}", "1")
        deadline_s = time.monotonic() + KEEP_ALIVE_S * KEEP_ALIVE_TIMES + 1.0
        while not self.is_incomplete():
            complete = all_stopped and self._try("check", stopped)
            if complete or self.ended() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(RETRY_S)
        return True

    def is_incomplete(self) -> bool:
        """Whether a node or the store is lost, or a newer attempt has begun."""
        change = self.find_change()
        return change is not None and change.kind != "join"

    def leave(self) -> None:
        """Keep hosting the store until the other nodes have read the exit code."""
        self._joining = False
        if not self._endpoint.hosts:
            self._try("set", f"trainer/bye/{_key(self._me)}", "1")
            return
        deadline_s = time.monotonic() + LINGER_S
        with contextlib.suppress(*STORE_ERRORS):
            while time.monotonic() < deadline_s:
                others = {(n.addr, n.pid) for n in self._state().last_heartbeats} - {self._me}
                keys = [f"trainer/bye/{_key(node)}" for node in others]
                if not keys or self._call("check", keys):
                    return
                time.sleep(RETRY_S)

    def _connect(self) -> dynamic.DynamicRendezvousHandler:
        self._backend, waiting = self._endpoint.connect(self._check_requests)
        if self._nonce:  # a new store: the launch keeps the id that this node knows
            self._call("set", "trainer/launch", self._launch_id)
        else:
            self._print_line(f"waiting for {self._min_nodes} to {self._max_nodes} nodes "
                             f"at {self._endpoint}")
            self._call("compare_set", "trainer/launch", "", self._launch_id)
        self._handler = dynamic.DynamicRendezvousHandler.from_backend(
            "trainer", waiting, self._backend, self._min_nodes, self._max_nodes, self._me[0],
            dynamic.RendezvousTimeout(join=timedelta(seconds=self._timeout_s),
                                      last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=KEEP_ALIVE_S, keep_alive_max_attempt=KEEP_ALIVE_TIMES,
        )
        return self._handler

    def _open_attempt(
        self, handler: dynamic.DynamicRendezvousHandler, info: elastic.RendezvousInfo
    ) -> elastic.RendezvousInfo:
        """Publish (on the round's first node) or read the attempt's nonce and store address."""
        self._attempt_server = None
        if info.rank == 0:
            self._attempt_server, port = host_store(self._me[0])
            attempt = {"address": self._me[0], "port": port, "nonce": uuid.uuid4().hex,
                       "launch": self._call("get", "trainer/launch").decode()}
            self._call("set", "trainer/newest", attempt["nonce"])
            info.store.set("trainer/attempt", json.dumps(attempt))
        attempt = json.loads(info.store.get("trainer/attempt"))
        self._nonce, self._launch_id = attempt["nonce"], attempt["launch"]
        state = torch_private.rendezvous_state(handler)
        self.members = frozenset((node.addr, node.pid) for node in state.participants)
        store_info = elastic.RendezvousStoreInfo(attempt["address"], attempt["port"])
        return elastic.RendezvousInfo(info.store, info.rank, info.world_size, store_info)

    def _drop_connections(self) -> None:
        if self._backend is not None:
            self._backend.close()
        if self._handler is not None:
            torch_private.stop_heartbeats(self._handler)
        self._handler = self._backend = None

    def _call(self, operation: str, *arguments: Any) -> Any:
        if self._backend is None:
            raise elastic.RendezvousConnectionError(f"{self._description} is lost")
        return self._backend.call(operation, *arguments)

    def _try(self, operation: str, *arguments: Any) -> Any:
        """The result of a store operation; None if the store is lost."""
        try:
            return self._call(operation, *arguments)
        except STORE_ERRORS:
            return None

    def _state(self) -> Any:
        if self._handler is None:
            raise elastic.RendezvousConnectionError(f"{self._description} is lost")
        self._handler.num_nodes_waiting()  # reads the state, at most once a second
        return torch_private.rendezvous_state(self._handler)

    def find_change(self) -> MembershipChange | None:
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

    def _report_forged(self) -> None:
        if not self._forged:
            self._forged = (f"{self._description} contains a value that is not signed with this "
                            f"node's {SECRET}: it differs between the nodes, or a stranger has "
                            "written to the store")
            self._print_line(self._forged)

    def _check_requests(self) -> None:
        self._call("check", ["trainer/launch"])  # a node that joins needs it unchanged
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


def _key(node: tuple[str, int]) -> str:
    return f"{node[0]}_{node[1]}"
