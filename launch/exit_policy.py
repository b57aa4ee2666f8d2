"""Decide from the exits of the ranks: restart or not, the run's exit code, and the cause."""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import EXIT_COMPLETE, EXIT_FAILURE, EXIT_STOPPED, FINAL_EXIT_CODES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit:
    """The exit of one rank."""

    rank: int
    code: int | None  # or minus the signal that killed it; None: its fork server had died before
    at_s: float  # when the launcher noticed it, on the monotonic clock
    forced: bool = False  # the launcher killed it or requested it to exit
    early: bool = False  # the code is one of the trainer, but something else called `os._exit`

    @property
    def complete(self) -> bool:
        return self.code == EXIT_COMPLETE and not self.early

    @property
    def failed(self) -> bool:
        return not self.complete and not self.stopped

    @property
    def final(self) -> bool:
        """Whether the trainer itself ended the attempt, so that nothing is restarted."""
        return self.code in FINAL_EXIT_CODES and not self.early

    @property
    def stopped(self) -> bool:
        return self.code == EXIT_STOPPED and not self.early

    def describe(self) -> str:
        """How the rank ended."""
        assert self.code is not None
        if self.code >= 0:
            early = " before it had finished" if self.early else ""
            return f"exited with code {self.code}{early}"
        number = -self.code  # real-time signals have no names
        return "was killed by " + next((s.name for s in signal.Signals if s == number),
                                       f"signal {number}")

    def __str__(self) -> str:
        if self.code is None:
            return "the fork server has died"
        return f"rank {self.rank} {self.describe()}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitDecision:
    code: int  # the launcher's exit code if it does not restart the ranks
    restart: bool  # whether a restart may help
    cause: Exit | None = None  # what ended the attempt; None if all ranks have finished


def decide(exits: Sequence[Exit], *, stop_at_s: float | None = None) -> ExitDecision:
    """Decide from the exits of all ranks of one attempt, in order, and the time of a stop request.
    The cause is the first exit that is not secondary: the peers of a rank that dies save and exit
    with code 1, which counts only if there is no other."""
    failures = [end for end in exits if not end.complete]
    if not failures:
        return ExitDecision(code=EXIT_COMPLETE, restart=False)
    unforced = [end for end in failures if not end.forced] or failures
    cause = next((end for end in unforced if end.code != EXIT_FAILURE), unforced[0])
    if cause.code is not None and cause.final:
        return ExitDecision(code=cause.code, restart=False, cause=cause)
    if stop_at_s is None:
        return ExitDecision(code=EXIT_FAILURE, restart=True, cause=cause)
    # SIGTERM kills only a rank that is still starting and so has nothing to save. A failure before
    # the stop request would have been restarted, and the next start resumes from the survivors'
    # save, so it counts as stopped.
    stopped = any(end.stopped for end in failures) or cause.at_s < stop_at_s or all(
        end.code == -signal.SIGTERM for end in failures)
    return ExitDecision(code=EXIT_STOPPED if stopped else EXIT_FAILURE, restart=False, cause=cause)


def first_failure(
    cause: Exit, failures: Sequence[Mapping[str, Any]], *, attempt: int | None, reached_step: int
) -> dict[str, Any] | None:
    """The event of an attempt's first failure: one of the `failures` that ranks have reported, or
    a new one for a rank that died without a report, unless the run has not counted the attempt."""
    reported = sorted(failures, key=lambda event: event["time"])
    primary = [event for event in reported if not event["echo"]]
    died_s = time.time() - time.monotonic() + cause.at_s
    unreported = not cause.final and (
        cause.code != EXIT_FAILURE or all(event["rank"] != cause.rank for event in reported))
    if primary and not (unreported and died_s < primary[0]["time"]):
        return dict(primary[0])
    if cause.code is None or not unreported or attempt is None:
        return None
    secondary = reported[0] if reported else {}  # its peers know the step and the phase
    return {"time": round(died_s, 6), "attempt": attempt, "nonce": secondary.get("nonce", ""),
            "node": socket.gethostname(), "rank": cause.rank,
            "step": secondary.get("step", reached_step), "phase": secondary.get("phase", "train"),
            "event": "death", "why": cause.describe(),
            "failed_step": secondary.get("failed_step", reached_step + 1)}
