"""A rank that ends by an exception: record it at once, tell the launcher, explain it at the end."""

from __future__ import annotations

import signal
import threading
import traceback
from typing import Any

from trainer.distributed.peer_errors import lost_peer
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, PeerFailed, TrainerError
from trainer.resilience.attempts import sentence
from trainer.resilience.diagnosis import Diagnosis, diagnose, remedies
from trainer.resilience.launcher_channel import record_failure, tell
from trainer.telemetry.events import Log, writable
from trainer.telemetry.std_streams import say


def forget_workers() -> None:
    """Ignore the death of loader workers from now on: torch would raise it at any line."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Failure:
    """The exception that ended this rank.

    Attributes:
        config: configuration of the run, as soon as it is known.
    """

    def __init__(self, log: Log) -> None:
        self.config: Any = None
        self._log = log
        self._error: BaseException | None = None  # its frames hold memory: dropped by `explain`
        self._found: Diagnosis | None = None
        self._event: dict[str, Any] = {}
        self._secondary = False

    def note(self, error: BaseException, *, step: int | None = None) -> None:
        """Record the failure, once, before the save that follows, which may take a while.

        The deaths of loader workers are ignored from here on.

        Args:
            step: the step that failed; default: the last complete one.
        """
        forget_workers()
        if self._error is not None and self._error in (error, error.__cause__):
            return
        self._error, self._secondary = error, lost_peer(error) or isinstance(error, PeerFailed)
        self._found = found = diagnose(error)
        self._event = self._log.event(
            "failure", why=": ".join(filter(None, (found.kind, found.message))),
            where=found.where, echo=self._secondary,
            failed_step=self._log.status.step if step is None else step,
            failed_phase=self._log.status.place, memory=found.memory,
        )  # fmt: skip
        tell("failure", self._event)
        record_failure(sentence(self._event), _stack(error), secondary=self._secondary)

    def end(self, error: TrainerError) -> None:
        """Record an end of the run that the message explains. If it may be started again, it is a
        failure for the launcher too."""
        code = error.exit_code
        event = self._log.event("stop", why=str(error), exit_code=code, error=type(error).__name__,
                                echo=error.teller not in (None, self._log.rank))
        if code == EXIT_FAILURE:
            tell("failure", event)
            record_failure(sentence(event), _stack(error), secondary=event["echo"])

    def explain(self) -> tuple[int, str]:
        """Explain it on the console; returns the exit code and the last line."""
        assert self._error is not None
        assert self._found is not None
        log, found = self._log, self._found
        if self._secondary:  # the rank that caused it explains it
            message = (str(self._error) if isinstance(self._error, PeerFailed)
                       else f"lost a peer after step {log.status.step} ({log.status.phase})")
            log.warning(f"{message}; leaving")
            self._error = None
            return EXIT_FAILURE, ""
        say(_stack(self._error))
        self._error = None
        if found.memory and self.config is not None:
            log.error("\n".join(self._memory_lines(found.memory)))
        if found.is_import:
            log.error("a failed import would fail again: the run is not restarted")
        log.error(last := sentence(self._event))
        return EXIT_CONFIG if found.is_import else EXIT_FAILURE, last

    def _memory_lines(self, memory: str) -> list[str]:
        who = ("a loader worker died, most often for lack of memory" if memory == "worker"
               else "out of memory")
        phase, size = self._event["failed_phase"], self.config.batch.micro_size
        lines = [f"{who}, in phase {phase}, with micro-batches of {size}. Remedies, in this "
                 "order:"]  # fmt: skip
        return lines + [f"  {number}. {remedy}" for number, remedy
                        in enumerate(remedies(memory, self.config), 1)]


def _stack(error: BaseException) -> str:
    return str(writable("".join(traceback.format_exception(error))))
