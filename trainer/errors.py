"""Exit codes and exceptions."""

from __future__ import annotations

import errno
from collections.abc import Iterable

EXIT_COMPLETE = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_STOPPED = 75
EXIT_GAVE_UP = 76
EXIT_NONFINITE = 77

FINAL_EXIT_CODES = (EXIT_CONFIG, EXIT_STOPPED, EXIT_GAVE_UP, EXIT_NONFINITE)
"""Exit codes with which the trainer ends the run itself: a launcher must not restart it."""

PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""Error numbers of path errors that a retry cannot fix."""


class TrainerError(Exception):
    """Base class of errors that end the run with a specific exit code."""

    exit_code = EXIT_FAILURE
    origin_rank: int | None = None
    """The rank that raised the error first, if it has reported it to this one."""


def from_rank(rank: int, error: TrainerError) -> TrainerError:
    """Mark an error as raised by another rank. Returns the error."""
    error.origin_rank = rank
    return error


class PeerFailed(RuntimeError):
    """Another rank has reported a failure; that rank gives the details."""


class ConfigError(TrainerError, ValueError):
    """Invalid configuration or data, found before training starts: flag, value and remedy."""

    exit_code = EXIT_CONFIG


class FileDamaged(ConfigError, OSError):
    """A file of a run can't be used: a link, no regular file, too large, or not what it has to be.
    """


class AlreadyFinished(TrainerError):
    """The run to be continued is complete: there is nothing to do."""

    exit_code = EXIT_COMPLETE


class StopRequested(TrainerError):
    """The run was stopped on request and its state is saved; the same command continues it."""

    exit_code = EXIT_STOPPED


class GaveUp(TrainerError):
    """The same step has failed repeatedly; another restart would not help."""

    exit_code = EXIT_GAVE_UP


class NonFinite(TrainerError):
    """There were more NaN or infinite losses or gradients than the configuration allows."""

    exit_code = EXIT_NONFINITE


class RanksDiffer(TrainerError):
    """The ranks' weights differ, and there is no earlier checkpoint to roll back to."""


class TooManyBadSamples(TrainerError):
    """Too many samples can't be read: the run would train on copies of the others."""

    exit_code = EXIT_CONFIG


class LossDidNotFall(TrainerError):
    """A run with --overfit has not learned its one batch."""

    exit_code = EXIT_CONFIG


class CheckpointDamaged(TrainerError):
    """A checkpoint doesn't match its manifest; the message names the difference."""


class CheckpointBusy(TrainerError):
    """Another process or thread is writing the checkpoint of the same step."""


class StaleAttempt(TrainerError):
    """A newer attempt owns the run folder; this process must exit without writing."""


class MirrorFailed(TrainerError):
    """The mirror can't be reached at a start that needs it; a restart tries again."""


class MirrorTaken(TrainerError):
    """Another start of the run owns its mirror; this attempt ends, and must not be restarted."""

    exit_code = EXIT_CONFIG


class SaveFailed(TrainerError):
    """A checkpoint could not be written and --checkpoint.on-error is stop."""


def listed(names: Iterable[object]) -> str:
    """The first five names, for a message; an ellipsis stands for the others."""
    first = [str(name) for name in names]
    return f"{', '.join(first[:5])}{', …' * (len(first) > 5)}"
