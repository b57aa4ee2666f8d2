"""Errors of samples: their messages, their way out of a loader worker, and their limit."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from trainer.distributed.peer_errors import text_of
from trainer.errors import ConfigError, TooManyBadSamples

T = TypeVar("T")

BAD_COUNT, BAD_SHARE = 100, 0.1
"""The run ends when the replaced samples exceed both this number and this share of all samples."""


@dataclass(frozen=True, kw_only=True)
class ReplacedSample:
    """A bad sample and its replacement, as indices into the user's data set."""

    index: Any
    by: Any
    epoch: int
    why: str
    worker: int | None  # the loader worker that read it; None: the rank's own process


class SampleError(RuntimeError):
    """A data set raised while a sample was read; names the sample, the process and a remedy."""

    single = False
    """Whether the error belongs to a single sample rather than to a whole micro-batch."""
    trace = ""
    """Traceback of the original exception, if it was raised in a loader worker."""


@contextmanager
def as_sample_error(doing: str | Callable[[], str]) -> Iterator[None]:
    """Turn an exception into a `SampleError` that names the current operation; in a loader worker
    also SystemExit and the like, because the exit would hide the reason. A `ConfigError` passes."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and this_worker() is None:
            raise
        what = doing if isinstance(doing, str) else doing()
        raise SampleError(f"{what} raised {summarize_exception(error)}") from error


def yield_items_and_error(items: Iterator[T], *, rank: int, worker: int | None) -> Iterator[Any]:
    """Yield the items, and a final `SampleError` in the form that `raise_or_return` returns."""
    try:
        yield from items
    except SampleError as error:
        yield raise_or_return(error, rank=rank, worker=worker)


def raise_or_return(error: SampleError, *, rank: int, worker: int | None = None, advice: str = ""
                    ) -> SampleError:  # fmt: skip
    """Add the process to an error's message and raise it. In a loader worker return it instead, to
    be raised by the rank: an exception that leaves a worker loses its cause and attributes."""
    place = f"rank {rank}" + ("" if worker is None else f", loader worker {worker}")
    located = SampleError(f"{error} ({place})" + (f"; {advice}" if advice and error.single else ""))
    if worker is None:
        raise located from error.__cause__
    located.trace = "".join(traceback.format_exception(error.__cause__))
    return located


class WorkerTraceback(Exception):
    """Shows the traceback of another process as the cause of an exception."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def check_replaced_share(replaced: int, consumed: int) -> None:
    """Raise `TooManyBadSamples` beyond `BAD_COUNT` and `BAD_SHARE`; the same on all ranks."""
    if replaced > max(BAD_COUNT, BAD_SHARE * consumed):
        raise TooManyBadSamples(
            f"--data.on-error skip: {replaced:,} of {consumed:,} samples were bad and have been "
            f"replaced, more than {BAD_SHARE:.0%}: the run would train on duplicates of the other "
            "samples; repair the data, or exclude the bad samples in dataset(). events.jsonl lists "
            "them (bad-sample).")


def summarize_exception(error: BaseException | None) -> str:
    """An exception's type and the first line of its message."""
    lines = [] if error is None else text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def this_worker() -> int | None:
    """The number of this loader worker; None in the rank's own process."""
    info = get_worker_info()
    return None if info is None else info.id
