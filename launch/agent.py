"""torch's elastic agent, driven by events, with ranks from the fork server."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousHandler

from launch.output import Output
from launch.progress import Progress, note
from launch.ranks import Ranks
from launch.signals import StopRequest
from launch.verdict import Exit, Verdict, first_failure, judge
from trainer.attempts import sentence
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_FAILURE

ROLE = "trainer"
POLL_S = 0.5
"""How often deadlines are looked at; the end of a rank and a signal are noticed at once."""

TERM_S = 5.0
"""From the SIGTERM to the SIGKILL of a rank that didn't leave by itself."""

STOPPED_LOOKS, LOOK_S = 120, 1.0
"""A rank that is found stopped so many times, so many seconds apart, is killed. Its peers do that
earlier, if there is one that runs."""

REMIND_S = 10.0
"""How often the launcher says that it still waits for ranks that were asked to stop."""


class HotAgent(SimpleElasticAgent):
    """Runs the ranks of this node until they are done, have failed too often, or are to stop.

    The superclass drives it: rendezvous, ranks started, watched, and started again after a
    failure. `remaining restarts` counts failures in a row without a later step being kept.

    Args:
        handler: brings the nodes together.
        num_ranks: of this node.
        max_restarts: failures without progress that are restarted.
        grace_s: after a rank has failed, how long the others may take to save and leave.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        ranks: Ranks,
        *,
        num_ranks: int,
        max_restarts: int,
        grace_s: float,
        stop: StopRequest,
        output: Output,
    ) -> None:
        spec = WorkerSpec(
            role=ROLE,
            local_world_size=num_ranks,
            rdzv_handler=handler,
            entrypoint="python -m trainer",  # a name in torch's events; ours is in the server
            max_restarts=max_restarts,
            monitor_interval=1e-6,  # `_monitor_workers` itself waits, for events
        )
        super().__init__(spec)
        self.verdict = Verdict(code=EXIT_FAILURE, restart=False)
        self._ranks = ranks
        self._grace_s = grace_s
        self._stop = stop
        self._output = output
        self._progress = Progress()
        self._attempt = 0
        self._exits: list[Exit] = []
        self._failed: Exit | None = None  # what the next start is the answer to
        self._cause = ""  # of that, in words
        self._phases: dict[str, float] = {}  # of a restart: when each began (seconds since 1970)
        self._stop_at_s: float | None = None
        self._stop_passed_on = False
        self._num_reminders = 0
        self._hurry_at: list[tuple[float, signal.Signals]] = []
        self._num_hurried = 0
        self._looked_s = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._exits = []
        self._stop_passed_on = False
        self._hurry_at, self._num_hurried = [], 0
        if self._phases:
            self._phases["fork"] = time.time()
        pids = self._ranks.start(self._environments(worker_group))
        self._phases = {}
        self._attempt += 1
        if self._failed is not None:
            self._say_restarted(self._failed)
            self._failed = None
        return pids

    def _environments(self, group: WorkerGroup) -> dict[int, dict[str, str]]:
        """What torchrun sets, by local rank."""
        handler = group.spec.rdzv_handler
        assert group.master_addr is not None
        shared = {
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": str(group.master_port),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "ROLE_NAME": ROLE,
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(handler.use_agent_store),
            "TRAINER_LAUNCH": "1",
            "TRAINER_GRACE_S": str(self._grace_s),
            "TRAINER_LAUNCH_ID": handler.get_run_id(),
            "TRAINER_LAUNCH_PHASES": json.dumps(self._phases),
        }
        return {
            worker.local_rank: {
                **shared,
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in group.workers
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait for the next event, or a moment; healthy while any rank lives."""
        self._exits += self._ranks.wait(POLL_S)
        self._pass_stop_on()
        self._share_stop()
        self._hurry_survivors()
        self._kill_stopped()
        if self._ranks.living:
            return RunResult(WorkerState.HEALTHY)
        self.verdict = judge(self._exits, stop_at_s=self._stop_at_s)
        if self.verdict.code == EXIT_COMPLETE:
            results = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, return_values=results)
        self._allow_restart(worker_group.spec.max_restarts)
        return RunResult(WorkerState.FAILED)

    def _pass_stop_on(self) -> None:
        if self._stop.signal is None:
            return
        if self._stop_at_s is None:
            self._stop_at_s = time.monotonic()
            self._output.say(
                f"{self._stop.signal.name}: asking the ranks to save and stop"
                " (Ctrl-C twice kills them at once)"
            )
        if not self._stop_passed_on:
            self._stop_passed_on = True
            self._ranks.signal(signal.SIGTERM)
        waited_s = time.monotonic() - self._stop_at_s
        if waited_s > REMIND_S * (self._num_reminders + 1):
            self._num_reminders += 1
            names = ", ".join(map(str, self._ranks.living))
            self._output.say(f"still waiting for rank {names} to save and leave ({waited_s:.0f} s)")

    def _share_stop(self) -> None:
        """A rank that was asked to stop, by somebody else, has left: so are the others."""
        stopped = any(end.stopped and not end.forced for end in self._exits)
        if stopped and not self._stop_passed_on:
            self._stop_passed_on = True
            self._ranks.signal(signal.SIGTERM)

    def _hurry_survivors(self) -> None:
        """Ranks that don't leave by themselves after a failure: ask them, then kill them.

        There is no limit after an end that isn't a failure: saving may take as long as it takes.
        """
        now_s = time.monotonic()
        if not self._hurry_at and not self._ranks.server_lives:
            # The group is whole and saves if it is asked, but nobody could tell how it ends, nor
            # restart it: that takes a new server.
            self._hurry_at = [(now_s, signal.SIGTERM), (now_s + self._grace_s, signal.SIGKILL)]
        elif not self._hurry_at and any(end.failed for end in self._exits):
            # Else each rank has its own words for the end, or its own answer to the stop.
            if self._stop.signal is None and not any(end.final for end in self._exits):
                self._ranks.tell("absent")
            late_s = now_s + self._grace_s
            self._hurry_at = [(late_s, signal.SIGTERM), (late_s + TERM_S, signal.SIGKILL)]
        for at_s, number in self._hurry_at[self._num_hurried :]:
            if now_s >= at_s and self._ranks.living:
                self._num_hurried += 1
                if number == signal.SIGKILL or not self._stop_passed_on:
                    self._ranks.signal(number, forced=True)

    def _kill_stopped(self) -> None:
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            for rank in self._ranks.kill_stopped(STOPPED_LOOKS):
                self._output.say(f"rank {rank} has been stopped for {STOPPED_LOOKS * LOOK_S:.0f} s"
                                 " and nothing has continued it: killed")

    def _allow_restart(self, max_restarts: int) -> None:
        """Tell the superclass, by its counter, whether to restart."""
        cause = self.verdict.cause
        assert cause is not None
        self._progress.update(self._ranks.run_folder)
        if self._progress.take_advance():
            self._remaining_restarts = max_restarts
        self._cause = self._find_cause(cause)
        if self.verdict.restart and (self._remaining_restarts or self._spare()):
            self._failed = cause
            self._note_phases()
        elif self.verdict.restart:
            used = f"{max_restarts} of {max_restarts} restarts used"
            self._output.say_last(f"{self._cause}; giving up, {used}")
        else:
            self._remaining_restarts = 0
            if self.verdict.code == EXIT_FAILURE:
                self._output.say(f"{self._cause} instead of stopping as asked")
            elif self.verdict.code == EXIT_CONFIG and self._ranks.failures:
                self._output.say_last(f"{self._cause}; that is not started again")

    def _note_phases(self) -> None:
        """All ranks have left: what comes next is told with what went before."""
        now_s, since_boot_s = time.time(), time.monotonic()
        first_at_s = min(end.at_s for end in self._exits)
        self._phases = {"stop": now_s - since_boot_s + first_at_s, "rendezvous": now_s}

    def _find_cause(self, cause: Exit) -> str:
        """What failed first, in words. A death that nobody has told of becomes an event."""
        folder = self._ranks.run_folder
        launch_id = self._worker_group.spec.rdzv_handler.get_run_id()
        event = first_failure(
            cause, self._ranks.failures, reached=self._progress.reached,
            attempt=self._progress.new_attempt(folder, launch_id),
        )  # fmt: skip
        if event is None:
            return str(cause)
        if event["event"] == "death" and folder is not None and self._stop_at_s is None:
            with contextlib.suppress(OSError):  # a full disk
                note(folder, event)
        return f"failed first: {sentence(event)}"

    def _spare(self) -> bool:
        """Whether to restart once more after all: a chance for agents that know of other causes."""
        return False

    def _say_restarted(self, cause: Exit) -> None:
        used = self._worker_group.spec.max_restarts - self._remaining_restarts
        lost = self._progress.steps_lost
        self._output.say(
            f"{self._cause}; restart {used} of {self._worker_group.spec.max_restarts}"
            + ("" if lost is None else f", {lost} step{'s' * (lost != 1)} lost")
            + f", ranks started again after {time.monotonic() - cause.at_s:.2f} s"
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None
    ) -> None:
        """Ask ranks that still live to save and leave; kill what is left after the grace time."""
        for number, limit_s in ((death_sig, self._grace_s), (signal.SIGKILL, TERM_S)):
            deadline_s = time.monotonic() + limit_s
            self._ranks.signal(number, forced=True)
            while self._ranks.living and time.monotonic() < deadline_s:
                self._exits += self._ranks.wait(POLL_S)

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # The superclass asks the name server for this host's name, each time, and nobody reads it.
        return Event(name=f"launch.{state}", source=source)
