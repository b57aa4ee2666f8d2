"""A rank's own end by an exception: noted at once, told to the launcher, explained at the end."""

from __future__ import annotations

import signal
import threading
import traceback
from typing import Any

from trainer.attempts import sentence
from trainer.diagnosis import Diagnosis, diagnose, lost_peer, remedies
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, PeerFailed, TrainerError
from trainer.launcher import record_failure, tell
from trainer.log import Log, writable
from trainer.pipe import say


def forget_workers() -> None:
    """The death of a loader worker is no news any more: torch would raise it, amid anything."""
    if threading.current_thread() is threading.main_thread():  # elsewhere it raises nothing
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class Failure:
    """What ended this rank, once something has.

    Attributes:
        config: the run's, as soon as it is known.
    """

    def __init__(self, log: Log) -> None:
        self.config: Any = None
        self._log = log
        self._error: BaseException | None = None  # with all that its frames hold, so not for long
        self._found: Diagnosis | None = None
        self._event: dict[str, Any] = {}
        self._echo = False

    def note(self, error: BaseException, *, step: int | None = None) -> None:
        """Write the failure down, at once, since what follows may take a while; once.

        From here on the death of a loader worker is no news.

        Args:
            step: in the making, or just made; default: the last one made.
        """
        forget_workers()
        if self._error is not None and self._error in (error, error.__cause__):
            return
        self._error, self._echo = error, lost_peer(error) or isinstance(error, PeerFailed)
        self._found = found = diagnose(error)
        self._event = self._log.event(
            "failure", why=": ".join(filter(None, (found.kind, found.message))),
            where=found.where, echo=self._echo,
            failed_step=self._log.status.step if step is None else step,
            failed_phase=self._log.status.place, memory=found.memory,
        )  # fmt: skip
        tell("failure", self._event)
        record_failure(sentence(self._event), _stack(error), echo=self._echo)

    def end(self, error: TrainerError) -> None:
        """Write down an end of the run that its message explains. One that may be started again is
        a failure to the launcher too."""
        code = error.exit_code
        event = self._log.event("stop", why=str(error), exit_code=code, error=type(error).__name__,
                                echo=error.teller not in (None, self._log.rank))
        if code == EXIT_FAILURE:
            tell("failure", event)
            record_failure(sentence(event), _stack(error), echo=event["echo"])

    def explain(self) -> tuple[int, str]:
        """Say on the console what it was; returns the exit code, and the last line."""
        assert self._error is not None
        assert self._found is not None
        log, found = self._log, self._found
        if self._echo:  # the cause is another rank's, which tells it
            told = (str(self._error) if isinstance(self._error, PeerFailed)
                    else f"lost a peer after step {log.status.step} ({log.status.phase})")
            log.warning(f"{told}; leaving")
            self._error = None
            return EXIT_FAILURE, ""
        say(_stack(self._error))
        self._error = None
        if found.memory and self.config is not None:
            log.error("\n".join(self._memory_lines(found.memory)))
        if found.is_import:
            log.error("code that can't be imported stays so: nothing is started again")
        log.error(last := sentence(self._event))
        return EXIT_CONFIG if found.is_import else EXIT_FAILURE, last

    def _memory_lines(self, memory: str) -> list[str]:
        who = ("a loader worker died; most often that is for want of memory" if memory == "worker"
               else "out of memory")
        phase, size = self._event["failed_phase"], self.config.batch.micro_size
        lines = [f"{who}, in phase {phase}, with micro-batches of {size}. What helps, in this "
                 "order:"]  # fmt: skip
        return lines + [f"  {number}. {remedy}" for number, remedy
                        in enumerate(remedies(memory, self.config), 1)]


def _stack(error: BaseException) -> str:
    return str(writable("".join(traceback.format_exception(error))))
