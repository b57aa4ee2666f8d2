"""Bad samples: how their errors are named and leave a loader worker; how many may be replaced."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from trainer.diagnosis import text_of
from trainer.errors import TooManyBadSamples

T = TypeVar("T")

BAD_COUNT, BAD_SHARE = 100, 0.1
"""More replaced samples than this number, and than this part of those consumed, end the run."""


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A bad sample, and the one that took its place: their indices in the user's data set."""

    index: Any
    by: Any
    epoch: int
    why: str
    worker: int | None
    """The loader worker that read it; None: the rank itself."""


class SampleError(RuntimeError):
    """A data set raised while one of its samples was read; says which, where, and how to go on."""

    single = False
    """Whether it is the error of one sample alone, and not of a whole micro-batch."""
    trace = ""
    """The traceback of what was raised, where that was in a loader worker."""


class named:
    """Errors inside say what was being done."""

    def __init__(self, doing: str | Callable[[], str]) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        # In a worker, whose end tells nothing, SystemExit and the like too: Ctrl-C isn't theirs.
        if isinstance(error, Exception) or (
                this_worker() is not None and error is not None
                and not isinstance(error, GeneratorExit)):
            doing = self._doing if isinstance(self._doing, str) else self._doing()
            raise SampleError(f"{doing} raised {brief(error)}") from error


def handing_over(items: Iterator[T], *, rank: int, worker: int | None) -> Iterator[Any]:
    """The items, and the error that ends them as `hand_over` has it."""
    try:
        yield from items
    except SampleError as error:
        yield hand_over(error, rank=rank, worker=worker)


def hand_over(
    error: SampleError, *, rank: int, worker: int | None, advice: str = ""
) -> SampleError:
    """Tell an error where it happened, and raise it; in a loader worker, from which no exception
    comes whole, return it instead as something to be `received`."""
    place = f"rank {rank}" + ("" if worker is None else f", loader worker {worker}")
    told = SampleError(f"{error} ({place})" + (f"; {advice}" if advice and error.single else ""))
    if worker is None:
        raise told from error.__cause__
    told.trace = "".join(traceback.format_exception(error.__cause__))
    return told


class WorkerTraceback(Exception):
    """The traceback of an exception in another process, for people."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def received(item: T | SampleError) -> T:
    """What a loader worker has read; raises the `SampleError` if it is one."""
    if isinstance(item, SampleError):
        raise item from WorkerTraceback(item.trace)
    return item


def refuse_copies(replaced: int, consumed: int) -> None:
    """Raises `TooManyBadSamples` where so many samples were replaced, of those consumed, that the
    run trains on copies of the others. Equal on all ranks where the numbers are."""
    if replaced > max(BAD_COUNT, BAD_SHARE * consumed):
        raise TooManyBadSamples(
            f"--data.on-error skip: {replaced:,} of {consumed:,} samples were bad and have been "
            f"replaced, more than {BAD_SHARE:.0%}: the run would train on copies of the others; "
            "mend the data, or leave those samples out in dataset(). events.jsonl names them "
            "(bad-sample).")


def brief(error: BaseException | None) -> str:
    """An exception in one line."""
    lines = [] if error is None else text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def this_worker() -> int | None:
    """The loader worker that this process is; None in a rank's own."""
    info = get_worker_info()
    return None if info is None else info.id
