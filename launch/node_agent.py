"""The agent of one node among several: they stop, restart and end together."""

from __future__ import annotations

import dataclasses
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from launch.agent import TERM_S, HotAgent
from launch.endpoint import STORE_ERRORS
from launch.nodes import Change, NodesRendezvous, RunOver
from launch.verdict import Verdict, judge
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_STOPPED, ConfigError

POLL_S = 0.25


class NodeAgent(HotAgent):
    """Restarts its ranks also when nodes come and go, which costs no restart of its count."""

    def __init__(self, handler: NodesRendezvous, *args: Any, **kwargs: Any) -> None:
        super().__init__(handler, *args, **kwargs)
        self._nodes = handler
        self._members: frozenset[tuple[str, int]] = frozenset()
        self._echo = False  # whether the failure may be the echo of another node's end

    def run(self, *args: Any) -> Any:
        """Until the run is over, for all nodes with the same exit code."""
        try:
            return super().run(*args)
        except RunOver as over:
            if over.why:
                self._output.say(over.why)
            self.verdict = Verdict(code=over.code, restart=False)
        except ConfigError as error:
            self._output.say(f"error: {error}")
            self.verdict = Verdict(code=EXIT_CONFIG, restart=False)
        finally:
            self._nodes.farewell()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._rendezvous(worker_group)
                return
            except STORE_ERRORS:
                continue  # a node has died between the meeting and its end: meet again

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before, self._members = self._members, self._nodes.members
        if self._echo and before != self._members:
            # The nodes are others than before: nothing has failed here.
            limit = worker_group.spec.max_restarts
            self._remaining_restarts = min(limit, self._remaining_restarts + 1)
            self._failed = None
        self._echo = False
        pids = super()._start_workers(worker_group)
        size = worker_group.workers[0].world_size if worker_group.workers else 0
        names = ", ".join(sorted(address for address, _ in self._members))
        self._output.say(f"{len(self._members)} node{'s' * (len(self._members) != 1)}: {names}; "
                         f"{size} rank{'s' * (size != 1)}")
        return pids

    def _pass_stop_on(self) -> None:
        if self._stop.signal is not None:
            self._nodes.ask_stop()
        elif self._nodes.stop_asked:
            self._output.say("another node was asked to stop")
            self._stop.signal = signal.SIGTERM
        super()._pass_stop_on()

    def _allow_restart(self, max_restarts: int) -> None:
        code = self.verdict.code
        asked = self._stop.signal is not None or self._nodes.stop_asked
        # Ranks whose launcher was killed ask all ranks to stop, so that may be the cause, too.
        if code == EXIT_STOPPED and not asked and (
            self._nodes.is_changing() or self._nodes.lacks_member(all_stopped=True)
        ):  # fmt: skip
            self._remaining_restarts += 1  # which torch takes off again
            self._note_phases()
            return
        if (ended := self._nodes.ended()) is not None:
            self._end(ended)
        if not self.verdict.restart:
            super()._allow_restart(max_restarts)
            self._end(code)
        cause = self.verdict.cause
        self._echo = cause is not None and cause.code == EXIT_FAILURE
        super()._allow_restart(max_restarts)
        if not self._remaining_restarts:
            self._end(EXIT_FAILURE)

    def _spare(self) -> bool:
        if self._echo and self._nodes.lacks_member():
            self._remaining_restarts = 1
            return True
        return False

    def _end(self, code: int) -> None:
        """End as the node that was first to find the run over.

        Raises:
            RunOver: always.
        """
        first = self._nodes.end(code)
        raise RunOver(first, "" if first == code else f"another node ended with code {first}")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        change, self._nodes.change = self._nodes.change, None
        if change is not None and self._ranks.living:
            self._output.say(f"{change.why}; the ranks save and start again")
            noticed_s = time.time()
            self._stop_for(change)
            self._phases = {"stop": noticed_s, "rendezvous": time.time()}
        super()._restart_workers(worker_group)

    def _stop_for(self, change: Change) -> None:
        """Let the ranks save and leave.

        With the group whole, that is an ordinary stop, which takes as long as it takes. Otherwise
        the ranks' connections are cut, since they may wait for a peer that is gone: each saves the
        last step boundary on its own, unless a newer attempt has begun.

        Raises:
            RunOver: the run came to its end meanwhile.
        """
        whole = change.kind == "join" or (change.kind == "lost" and len(self._members) == 1)
        if whole:
            self._nodes.begin_change()
            self._ranks.signal(signal.SIGTERM, forced=True)
        else:
            self._ranks.tell(change.kind)
        kill_at = None if whole else time.monotonic() + self._grace_s
        while self._ranks.living:
            self._exits += self._ranks.wait(POLL_S)
            self._pass_stop_on()
            now_s = time.monotonic()
            if kill_at is not None and now_s > kill_at + TERM_S:
                self._ranks.signal(signal.SIGKILL, forced=True)
            elif kill_at is not None and now_s > kill_at:
                self._ranks.signal(signal.SIGTERM, forced=True)
            elif kill_at is None and (self._is_broken() or not self._ranks.server_lives):
                self._ranks.tell("lost")
                kill_at = now_s + self._grace_s
        self.verdict = judge([dataclasses.replace(end, forced=False) for end in self._exits],
                             stop_at_s=self._stop_at_s)
        code = self.verdict.code
        if not self.verdict.restart and (code != EXIT_STOPPED or self._stop.signal is not None):
            self._end(code)

    def _is_broken(self) -> bool:
        """Whether the group isn't whole any more: a rank has failed, or a node is lost."""
        failed = any(end.failed for end in self._exits)
        self._nodes.change = None
        return failed or bool(self._nodes.num_nodes_waiting() and self._nodes.change
                              and self._nodes.change.kind != "join")

    def _exit_barrier(self) -> None:
        """All ranks of the run have come to its end together."""
        self.verdict = Verdict(code=self._nodes.end(self.verdict.code), restart=False)
