"""What the ends of the ranks mean: restart, or the run's exit code, and whose end was the cause."""

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
    """The end of one rank.

    Attributes:
        rank: global rank.
        code: exit code, or minus the number of the signal that killed it; None where nobody could
            tell, because the process that forked it had died.
        at_s: when it was noticed, on the monotonic clock.
        forced: the launcher itself killed it, or asked it to leave.
        early: it has left with a code that is the trainer's own to give, and before the trainer
            came to its end: something called `os._exit`.
    """

    rank: int
    code: int | None
    at_s: float
    forced: bool = False
    early: bool = False

    @property
    def complete(self) -> bool:
        """Whether it had nothing more to do."""
        return self.code == EXIT_COMPLETE and not self.early

    @property
    def failed(self) -> bool:
        """Whether its peers are in trouble."""
        return not self.complete and not self.stopped

    @property
    def final(self) -> bool:
        """Whether the trainer itself has ended the run."""
        return self.code in FINAL_EXIT_CODES and not self.early

    @property
    def stopped(self) -> bool:
        """Whether the trainer has stopped on request."""
        return self.code == EXIT_STOPPED and not self.early

    def __str__(self) -> str:
        if self.code is None:
            return "the fork server has died"
        if self.code >= 0:
            early = " before its end" if self.early else ""
            return f"rank {self.rank} exited with code {self.code}{early}"
        return f"rank {self.rank} was killed by {signal_name(-self.code)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """`restart` says that new ranks may help; `code` is the launcher's exit code if they don't."""

    code: int
    restart: bool
    cause: Exit | None = None


def judge(exits: Sequence[Exit], *, stop_at_s: float | None = None) -> Verdict:
    """Decide from the ends of all ranks of one attempt, in the order in which they were noticed.

    The cause is the first end that isn't an echo. When a rank dies, its peers find their
    connections broken, save and leave with code 1: such an end counts only if there is no other.

    Args:
        exits: one for each rank.
        stop_at_s: when the launcher was asked to stop, on the monotonic clock; None if it wasn't.
    """
    failures = [end for end in exits if not end.complete]
    if not failures:
        return Verdict(code=EXIT_COMPLETE, restart=False)
    own = [end for end in failures if not end.forced] or failures
    cause = next((end for end in own if end.code != EXIT_FAILURE), own[0])
    if stop_at_s is not None:
        return Verdict(
            code=_code_after_stop(failures, cause, stop_at_s), restart=False, cause=cause
        )
    if cause.code is not None and cause.final:
        return Verdict(code=cause.code, restart=False, cause=cause)
    return Verdict(code=EXIT_FAILURE, restart=True, cause=cause)


def first_failure(
    cause: Exit, failures: Sequence[Mapping[str, Any]], *, attempt: int | None, reached: int
) -> dict[str, Any] | None:
    """What failed first in an attempt: the event with which a rank has told it, or, for a rank that
    died without a word, a new one. None if neither can be said.

    Args:
        cause: the verdict's.
        failures: the events that ranks have told.
        attempt: the run's count; None if the ranks had not come so far.
        reached: the last step that was finished.
    """
    told = sorted(failures, key=lambda event: event["time"])
    own = [event for event in told if not event["echo"]]
    died_s = time.time() - time.monotonic() + cause.at_s
    wordless = not cause.final and (
        cause.code != EXIT_FAILURE or all(event["rank"] != cause.rank for event in told))
    if own and not (wordless and died_s < own[0]["time"]):
        return dict(own[0])
    if cause.code is None or not wordless or attempt is None:
        return None
    how = f"exited with code {cause.code}" if cause.code >= 0 else (
        f"was killed by {signal_name(-cause.code)}")
    echo = told[0] if told else {}  # its peers know where they were
    return {"time": round(died_s, 6), "attempt": attempt, "nonce": echo.get("nonce", ""),
            "node": socket.gethostname(), "rank": cause.rank, "step": echo.get("step", reached),
            "phase": echo.get("phase", "train"), "event": "death", "why": how,
            "failed_step": echo.get("failed_step", reached + 1)}  # fmt: skip


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals, which have no name each, by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _code_after_stop(failures: Sequence[Exit], cause: Exit, stop_at_s: float) -> int:
    if cause.code is not None and cause.final:
        return cause.code
    if any(end.stopped for end in failures):
        return EXIT_STOPPED
    # SIGTERM kills only a rank that is still starting and so has nothing to save. A failure older
    # than the request would have been restarted: what its survivors saved is where to go on.
    unstarted = all(end.code == -signal.SIGTERM for end in failures)
    return EXIT_STOPPED if unstarted or cause.at_s < stop_at_s else EXIT_FAILURE
