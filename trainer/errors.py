"""Exit codes, and the exceptions that somebody catches."""

import errno

EXIT_COMPLETE = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_STOPPED = 75
EXIT_GAVE_UP = 76
EXIT_NONFINITE = 77

FINAL_EXIT_CODES = (EXIT_CONFIG, EXIT_STOPPED, EXIT_GAVE_UP, EXIT_NONFINITE)
"""Codes with which the trainer itself ends the run: a launcher must not restart them."""

UNFIT = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""Errors of a folder's path that no other attempt would find mended."""


class TrainerError(Exception):
    """An end of the run that has an exit code of its own.

    Attributes:
        teller: the rank whose error it is, where another rank has told of it.
    """

    exit_code = EXIT_FAILURE
    teller: int | None = None


def told_by(rank: int, error: TrainerError) -> TrainerError:
    """The error, marked as another rank's."""
    error.teller = rank
    return error


class PeerFailed(RuntimeError):
    """Another rank has told that it failed, and tells more itself."""


class ConfigError(TrainerError, ValueError):
    """Bad configuration or data, found before anything started: names flag, value and remedy."""

    exit_code = EXIT_CONFIG


class AlreadyFinished(TrainerError):
    """The run that is to be continued is complete: there is nothing to do."""

    exit_code = EXIT_COMPLETE


class StopRequested(TrainerError):
    """The run was asked to stop, its state is saved, and the same command continues it."""

    exit_code = EXIT_STOPPED


class GaveUp(TrainerError):
    """The same step failed again and again; another restart would not get further."""

    exit_code = EXIT_GAVE_UP


class NonFinite(TrainerError):
    """More non-finite losses or gradients than the configuration allows."""

    exit_code = EXIT_NONFINITE


class RanksDiffer(TrainerError):
    """Ranks hold different weights, and nothing from before is left to go back to."""


class TooManyBadSamples(TrainerError):
    """So many samples could not be read that the run would train on copies of the others."""

    exit_code = EXIT_CONFIG


class CheckpointDamaged(TrainerError):
    """A checkpoint folder is not what its manifest says; the message names what differs."""


class CheckpointBusy(TrainerError):
    """Another process or thread is writing the checkpoint of the same step."""


class StaleAttempt(TrainerError):
    """A newer attempt owns the run folder; this process must leave without writing."""


class SaveFailed(TrainerError):
    """A checkpoint could not be written and --checkpoint.on-error is stop."""
