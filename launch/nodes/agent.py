"""The agent of one node in a multi-node run: all nodes stop, restart and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import WorkerGroup

from launch.agent import TERM_S, HotAgent
from launch.exit_policy import ExitDecision, decide
from launch.nodes.endpoint import STORE_ERRORS
from launch.nodes.rendezvous import MembershipChange, NodesRendezvous, RunEnded
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_STOPPED, ConfigError

POLL_S = 0.25


class NodeAgent(HotAgent):
    """Also restarts its ranks when nodes join or leave, without using up `max_restarts`."""

    def __init__(self, handler: NodesRendezvous, *args: Any, **kwargs: Any) -> None:
        super().__init__(handler, *args, **kwargs)
        self._nodes = handler
        self._members: frozenset[tuple[str, int]] = frozenset()
        self._maybe_secondary = False  # the failure may follow from another node's exit

    def run(self, *args: Any) -> Any:
        try:
            return super().run(*args)
        except RunEnded as over:
            if over.reason:
                self._output.print_line(over.reason)
            self.decision = ExitDecision(code=over.code, restart=False)
        except ConfigError as error:
            self._output.print_line(f"error: {error}")
            self.decision = ExitDecision(code=EXIT_CONFIG, restart=False)
        finally:
            self._nodes.leave()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            with contextlib.suppress(*STORE_ERRORS):  # a node died during the rendezvous: repeat it
                super()._rendezvous(worker_group)
                return

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before, self._members = self._members, self._nodes.members
        if self._maybe_secondary and before != self._members:  # it was not this node's failure
            self._remaining_restarts = min(self._max_restarts, self._remaining_restarts + 1)
            self._failed = None
        self._maybe_secondary = False
        pids = super()._start_workers(worker_group)
        size = worker_group.workers[0].world_size
        names = sorted(address for address, _ in self._members)
        self._output.print_line(f"{len(names)} node{'s' * (len(names) != 1)}: {', '.join(names)}; "
                                f"{size} rank{'s' * (size != 1)}")
        return pids

    def _forward_stop(self) -> None:
        if self._stop.signal is not None:
            self._nodes.request_stop()
        elif self._nodes.stop_requested:
            self._output.print_line("another node received a stop request")
            self._stop.request(signal.SIGTERM)
        super()._forward_stop()

    def _allow_restart(self) -> None:
        code = self.decision.code
        requested = self._stop.signal is not None or self._nodes.stop_requested
        # Ranks whose launcher was killed request a stop of all ranks: this may be the cause, too.
        if code == EXIT_STOPPED and not requested and (
                self._nodes.is_changing() or self._nodes.has_lost_member(all_stopped=True)):
            self._remaining_restarts += 1  # torch subtracts it again
            self._record_phases()
            return
        if (ended := self._nodes.ended()) is not None:
            self._end(ended)
        if not self.decision.restart:
            super()._allow_restart()
            self._end(code)
        cause = self.decision.cause
        self._maybe_secondary = cause is not None and cause.code == EXIT_FAILURE
        if self._maybe_secondary and not self._remaining_restarts:
            self._remaining_restarts = int(self._nodes.has_lost_member())
        super()._allow_restart()
        if not self._remaining_restarts:
            self._end(EXIT_FAILURE)

    def _end(self, code: int) -> NoReturn:
        first = self._nodes.end(code)
        raise RunEnded(first, "" if first == code else f"another node ended with code {first}")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._ranks.living:
            change = self._nodes.find_change()
            if change is None:  # the node that was to join is gone
                return
            self._output.print_line(f"{change.reason}; the ranks save and restart")
            noticed_s = time.time()
            self._stop_for(change)
            self._phases = {"stop": noticed_s, "rendezvous": time.time()}
        super()._restart_workers(worker_group)

    def _stop_for(self, change: MembershipChange) -> None:
        """Let the ranks save and exit. A complete group has no time limit. Otherwise the ranks
        close their connections, because they may wait for a peer that is gone, and each saves the
        last step boundary alone, unless a newer attempt has begun."""
        self._escalation = None
        if change.kind == "join" or (change.kind == "lost" and len(self._members) == 1):
            self._nodes.begin_change()
            self._ranks.signal(signal.SIGTERM, forced=True)
        else:
            self._disconnect(change.kind)
        while self._ranks.living:
            self._exits += self._ranks.wait(POLL_S)
            self._forward_stop()
            self._send_due()
            if self._escalation is None and (
                    any(end.failed for end in self._exits) or not self._ranks.server_lives
                    or self._nodes.is_incomplete()):
                self._disconnect("lost")
        self.decision = decide([dataclasses.replace(end, forced=False) for end in self._exits],
                               stop_at_s=self._stop_at_s)
        code = self.decision.code
        if not self.decision.restart and (code != EXIT_STOPPED or self._stop.signal is not None):
            self._end(code)

    def _disconnect(self, keyword: str) -> None:
        self._ranks.send_keyword(keyword)
        self._begin_escalation(self._grace_s, self._grace_s + TERM_S)

    def _exit_barrier(self) -> None:
        self.decision = ExitDecision(code=self._nodes.end(self.decision.code), restart=False)
