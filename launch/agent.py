"""torch's elastic agent, event-driven, with ranks started by the fork server."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import Any

from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.rendezvous import RendezvousHandler

from launch.exit_policy import Exit, ExitDecision, decide, first_failure
from launch.options import Options
from launch.output import Output
from launch.progress import RunProgress, append_event, read_attempt, read_progress
from launch.signals import LauncherStop
from launch.workers import Workers
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_FAILURE
from trainer.resilience.attempts import failure_sentence

ROLE = "trainer"
POLL_S = 0.5  # interval of checks of deadlines; exits and signals are noticed immediately
TERM_S = 5.0  # between SIGTERM and SIGKILL for a rank that does not exit by itself
REMIND_S = 10.0  # interval of the message that the launcher still waits for ranks


class HotAgent(api.SimpleElasticAgent):
    """Runs the ranks of this node until they finish, fail too often, or are requested to stop. The
    superclass runs the main loop: rendezvous, start the ranks, monitor them, restart. It decides by
    its private `_remaining_restarts`, which is reset when a later step has been saved."""

    def __init__(
        self, handler: RendezvousHandler, ranks: Workers, options: Options, stop: LauncherStop,
        output: Output,
    ) -> None:
        super().__init__(api.WorkerSpec(
            role=ROLE, local_world_size=options.nproc_per_node, rdzv_handler=handler,
            max_restarts=options.max_restarts, entrypoint="python -m trainer",  # only a label
            monitor_interval=1e-6))  # `_monitor_workers` itself waits for events
        self.decision = ExitDecision(code=EXIT_FAILURE, restart=False)
        self._ranks, self._stop, self._output = ranks, stop, output
        self._max_restarts, self._grace_s = options.max_restarts, options.grace_s
        self._progress = RunProgress()
        self._attempt = 0  # counted from 0 in this launch
        self._run_attempt: int | None = None  # the last one that the run has counted
        self._exits: list[Exit] = []
        self._failed: Exit | None = None  # the failure that the next start follows
        self._cause_text = ""  # description of `_failed`
        self._phases: dict[str, float] = {}  # of a restart: start times, in seconds since the epoch
        self._stop_at_s: float | None = None
        self._stop_forwarded = False
        self._num_reminders = 0
        self._escalation: list[tuple[float, signal.Signals]] | None = None
        """Signals still to be sent, with their times, to ranks that do not exit; None: no limit."""

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, Any]:
        self._exits, self._escalation, self._stop_forwarded = [], None, False
        if self._phases:
            self._phases["fork"] = time.time()
        self._ranks.start(self._environments(worker_group))
        self._phases = {}
        self._attempt += 1
        if self._failed is not None:
            used, lost = self._max_restarts - self._remaining_restarts, self._progress.steps_lost
            steps_lost = "" if lost is None else f", {lost} step{'s' * (lost != 1)} lost"
            self._output.print_line(
                f"{self._cause_text}; restart {used} of {self._max_restarts}{steps_lost}, "
                f"ranks restarted after {time.monotonic() - self._failed.at_s:.2f} s")
            self._failed = None
        return {}  # pids, which torch only records

    def _environments(self, group: api.WorkerGroup) -> dict[int, dict[str, str]]:
        """The environment variables that torchrun would set, by local rank."""
        handler = group.spec.rdzv_handler
        shared = {
            "MASTER_ADDR": group.master_addr, "MASTER_PORT": group.master_port,
            "GROUP_RANK": group.group_rank, "GROUP_WORLD_SIZE": group.group_world_size,
            "LOCAL_WORLD_SIZE": group.spec.local_world_size, "ROLE_NAME": ROLE,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": self._max_restarts,
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": handler.use_agent_store,
            "TRAINER_LAUNCH": 1, "TRAINER_GRACE_S": self._grace_s,
            "TRAINER_LAUNCH_ID": handler.get_run_id(),
            "TRAINER_LAUNCH_PHASES": json.dumps(self._phases),
        }
        own = {worker.local_rank: {
            "RANK": worker.global_rank, "LOCAL_RANK": worker.local_rank,
            "WORLD_SIZE": worker.world_size, "ROLE_RANK": worker.role_rank,
            "ROLE_WORLD_SIZE": worker.role_world_size} for worker in group.workers}
        return {local_rank: {name: str(value) for name, value in {**shared, **more}.items()}
                for local_rank, more in own.items()}

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        """Wait for the next event or `POLL_S`. HEALTHY while any rank is alive."""
        self._exits += self._ranks.wait(POLL_S)
        self._forward_stop()
        self._escalate()
        if self._ranks.living:
            return api.RunResult(api.WorkerState.HEALTHY)
        self.decision = decide(self._exits, stop_at_s=self._stop_at_s)
        if self.decision.code == EXIT_COMPLETE:
            results = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
            return api.RunResult(api.WorkerState.SUCCEEDED, return_values=results)
        self._allow_restart()
        return api.RunResult(api.WorkerState.FAILED)

    def _forward_stop(self) -> None:
        """Stop all ranks at the launcher's request, or once one has exited on a stop request."""
        now_s = time.monotonic()
        if self._stop.signal is not None and self._stop_at_s is None:
            self._stop_at_s = now_s
            self._output.print_line(f"{self._stop.signal.name}: requesting all ranks to save and "
                                    "stop (press Ctrl-C twice to kill them)")
        requested = self._stop_at_s is not None or any(
            end.stopped and not end.forced for end in self._exits)
        if requested and not self._stop_forwarded:
            self._stop_forwarded = True
            self._ranks.signal(signal.SIGTERM)
        waited_s = 0.0 if self._stop_at_s is None else now_s - self._stop_at_s
        if waited_s > REMIND_S * (self._num_reminders + 1):
            self._num_reminders += 1
            self._output.print_line(
                f"still waiting for rank {', '.join(map(str, self._ranks.living))} to save and "
                f"exit ({waited_s:.0f} s)")

    def _escalate(self) -> None:
        """After a failure, send SIGTERM and then SIGKILL to ranks that do not exit by themselves.
        After an exit that is not a failure there is no limit, because a save may take long."""
        if self._escalation is None and not self._ranks.server_lives:
            # The complete group saves on request. Its exit codes are unknown without a fork server.
            self._begin_escalation(0.0, self._grace_s)
        elif self._escalation is None and any(end.failed for end in self._exits):
            # After a final exit or a stop request, each rank handles the end of the run itself.
            if self._stop.signal is None and not any(end.final for end in self._exits):
                self._ranks.send_keyword("absent")
            self._begin_escalation(self._grace_s, self._grace_s + TERM_S)
        self._send_due()

    def _begin_escalation(self, term_s: float, kill_s: float) -> None:
        self._ranks.signal(signal.SIGCONT)  # a stopped rank (SIGSTOP) could neither save nor exit
        now_s = time.monotonic()
        self._escalation = [(now_s + term_s, signal.SIGTERM), (now_s + kill_s, signal.SIGKILL)]

    def _send_due(self) -> None:
        while self._escalation and time.monotonic() >= self._escalation[0][0]:
            _, number = self._escalation.pop(0)
            if number == signal.SIGKILL or not self._stop_forwarded:
                self._ranks.signal(number, forced=True)

    def _allow_restart(self) -> None:
        """Set the superclass's restart counter, by which it decides whether to restart."""
        cause = self.decision.cause
        assert cause is not None
        saved_before = self._progress.saved_step
        if self._ranks.run_folder is not None:
            self._progress = read_progress(self._ranks.run_folder)
        if self._progress.saved_step > saved_before:
            self._remaining_restarts = max(self._remaining_restarts, self._max_restarts)
        self._cause_text = self._find_cause(cause)
        if self.decision.restart and self._remaining_restarts:
            self._failed = cause
            self._record_phases()
        elif self.decision.restart:
            used = f"{self._max_restarts} of {self._max_restarts} restarts used"
            self._output.set_last_line(f"{self._cause_text}; giving up, {used}")
        else:
            self._remaining_restarts = 0
            if self.decision.code == EXIT_FAILURE:
                self._output.print_line(f"{self._cause_text} instead of stopping as requested")
            elif self.decision.code == EXIT_CONFIG and self._ranks.failures:
                self._output.set_last_line(f"{self._cause_text}; not restarted, would fail again")

    def _record_phases(self) -> None:
        """Record the phase times so far for the next start; all ranks have exited."""
        now_s, since_boot_s = time.time(), time.monotonic()
        first_at_s = min(end.at_s for end in self._exits)
        self._phases = {"stop": now_s - since_boot_s + first_at_s, "rendezvous": now_s}

    def _find_cause(self, cause: Exit) -> str:
        """Describe what failed first; append an event for a death that no rank has reported."""
        folder, attempt = self._ranks.run_folder, None
        if folder is not None:
            launch_id = self.get_worker_group().spec.rdzv_handler.get_run_id()
            attempt = read_attempt(folder, launch_id)
        if attempt == self._run_attempt:  # the ranks died before the run counted a new one
            attempt = None
        elif attempt is not None:
            self._run_attempt = attempt
        event = first_failure(cause, self._ranks.failures, attempt=attempt,
                              reached_step=self._progress.reached_step)
        if event is None:
            return str(cause)
        if event["event"] == "death" and folder is not None and self._stop_at_s is None:
            with contextlib.suppress(OSError):  # a full disk
                append_event(folder, event)
        return f"failed first: {failure_sentence(event)}"

    def _stop_workers(self, worker_group: api.WorkerGroup) -> None:
        assert not self._ranks.living  # `_monitor_workers` and `_restart_workers` wait for them

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Request living ranks to save and exit; kill the rest after the grace time. There are some
        only after an error of the launcher: torch passes a signal for handlers of its own, which
        are not installed here, and its time limit is replaced by `--grace-s`."""
        self._begin_escalation(0.0, self._grace_s)
        deadline_s = time.monotonic() + self._grace_s + TERM_S
        while self._ranks.living and time.monotonic() < deadline_s:
            self._send_due()
            self._exits += self._ranks.wait(POLL_S)

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # Private: the superclass would look up this host's name at each event, for nothing.
        return Event(name=f"launch.{state}", source=source)
