"""What the ends of the ranks mean: restart, or the run's exit code, and whose end was the cause."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

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
    """

    rank: int
    code: int | None
    at_s: float
    forced: bool = False

    def __str__(self) -> str:
        if self.code is None:
            return "the fork server was killed"
        if self.code >= 0:
            return f"rank {self.rank} exited with code {self.code}"
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
    failures = [end for end in exits if end.code != EXIT_COMPLETE]
    if not failures:
        return Verdict(code=EXIT_COMPLETE, restart=False)
    own = [end for end in failures if not end.forced] or failures
    cause = next((end for end in own if end.code != EXIT_FAILURE), own[0])
    if stop_at_s is not None:
        return Verdict(
            code=_code_after_stop(failures, cause, stop_at_s), restart=False, cause=cause
        )
    if cause.code in FINAL_EXIT_CODES:
        return Verdict(code=cause.code, restart=False, cause=cause)
    return Verdict(code=EXIT_FAILURE, restart=True, cause=cause)


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals, which have no name each, by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _code_after_stop(failures: Sequence[Exit], cause: Exit, stop_at_s: float) -> int:
    if cause.code in FINAL_EXIT_CODES:
        return cause.code
    if any(end.code == EXIT_STOPPED for end in failures):
        return EXIT_STOPPED
    # SIGTERM kills only a rank that is still starting and so has nothing to save. A failure older
    # than the request would have been restarted: what its survivors saved is where to go on.
    unstarted = all(end.code == -signal.SIGTERM for end in failures)
    return EXIT_STOPPED if unstarted or cause.at_s < stop_at_s else EXIT_FAILURE
