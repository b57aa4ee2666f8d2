"""Read a data set in loader processes, or in this process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from trainer.data.sample_errors import (
    SampleError,
    WorkerTraceback,
    summarize_exception,
    this_worker,
)
from trainer.errors import ConfigError
from trainer.resilience import stack_dumps
from trainer.resilience.stop_signals import STOP_SIGNALS
from trainer.storage import processes

T = TypeVar("T")

ANSWER_S = 90.0
"""Longest wait for what a forked process has computed."""
SMALL = 128 << 10
"""Size limit in bytes for sending a tensor through a loader process's pipe. Larger tensors go
through shared memory, which needs a new connection to the process for each tensor (1 ms)."""


class DataReader(Iterator[Any]):
    """Iterates over the items of a data set, which are complete batches.

    Args:
        sampler: the indices of a map-style data set; None for a stream.
        workers: loader processes; 0 reads in this process.
        prefetch: items to read ahead, per process.
        first_worker: number of the first loader process.
    """

    def __init__(
        self, dataset: Any, *, sampler: Iterable[Any] | None = None, workers: int, prefetch: int,
        device: torch.device, first_worker: int = 0,
    ) -> None:  # fmt: skip
        self._dataset, self._sampler = dataset, sampler
        self._pinned = device.type == "cuda"
        self._loader: DataLoader[Any] | None = None
        if workers:
            self._loader = DataLoader(
                dataset, sampler=sampler, batch_size=None, collate_fn=_packed, num_workers=workers,
                prefetch_factor=prefetch, pin_memory=self._pinned,
                persistent_workers=sampler is None,
                # With another start method a rank forked by the launcher's fork server would start
                # a second server for its workers.
                multiprocessing_context="fork",
                worker_init_fn=partial(_start_worker, os.getpid(), first_worker),
                generator=torch.Generator())  # otherwise iter() draws from the process-wide one
        self._iterator: Iterator[Any]
        self.restart()

    def restart(self) -> None:
        """Begin another iteration over the data set."""
        if self._loader is not None:
            self._iterator = iter(self._loader)
            return
        # Without a DataLoader: its overhead would be as large as the time for reading.
        self._iterator = (iter(self._dataset) if self._sampler is None else
                          map(self._dataset.__getitem__, self._sampler))
        if self._pinned:
            self._iterator = (item.pin_memory() for item in self._iterator)

    def __next__(self) -> Any:
        item = next(self._iterator)
        if isinstance(item, _Packed):
            item = item.unpacked()
        if isinstance(item, SampleError):
            raise item from WorkerTraceback(item.trace)
        return item

    def close(self) -> None:
        """End the loader processes."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def call_in_child(function: Callable[[], T], *, daemon: bool) -> T:
    """The result of a function in a forked process, which leaves no trace in this one.

    Args:
        daemon: the process can't have child processes, as a loader process can't.

    Raises:
        RuntimeError: the function raised, or the process died.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(function, sender, os.getpid()), daemon=daemon)
    process.start()
    sender.close()
    try:
        if not receiver.poll(ANSWER_S):
            process.kill()
            raise ConfigError(
                f"--task: a forked process read no sample of the training stream in {ANSWER_S:g} s,"
                " as if the data set had begun a thread before its __iter__, which a fork does not "
                "copy; begin threads there, or use --start-checks off.")
        result, error = receiver.recv()
    except EOFError:
        result, error = None, "the process died"
    finally:
        receiver.close()
        process.join()
    if error:
        raise RuntimeError(error)
    return result


def _answer(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    _start_worker(parent, 0, 0)
    try:
        sender.send((function(), ""))
    except BaseException as error:
        sender.send((None, summarize_exception(error)))
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)  # without waiting for threads of the data set


@dataclass(frozen=True)
class _Packed:
    """An item of a loader process, pickled where it is read, so that a failure (an object that
    can't be pickled, exhausted shared memory) is raised in the rank. The thread of the process's
    queue would print it, and the rank would wait forever."""

    data: bytes

    def unpacked(self) -> Any:
        return ForkingPickler.loads(self.data)

    def pin_memory(self) -> Any:
        """Called by the DataLoader."""
        item = self.unpacked()
        return item if isinstance(item, SampleError) else item.pin_memory()


def _packed(item: Any) -> Any:
    return item if this_worker() is None else _Packed(bytes(_Pickler.dumps(item)))


class _Pickler(ForkingPickler):
    """Pickles tensors as torch does, but small storages by value, once for all their tensors."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.UntypedStorage) or item.is_shared() or (
                item.device.type != "cpu" or not 0 < item.nbytes() <= SMALL):
            return NotImplemented
        return _with_bytes, (ctypes.string_at(item.data_ptr(), item.nbytes()),)


def _with_bytes(data: bytes) -> torch.UntypedStorage:
    """A storage of this process with these bytes, aligned as by torch's allocator."""
    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _start_worker(rank: int, first: int, number: int) -> None:
    """Set up a loader process: it dies with its rank, ignores stop signals, uses one thread, and
    has its own offsets in the files that the data set has open."""
    # The worker has inherited the rank's sockets. If it outlived the rank, the peers would not
    # notice the rank's death.
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != rank:
        os._exit(0)
    processes.separate_reads()
    torch.set_num_threads(1)
    stack_dumps.prepare_worker(first + number)
    # A launcher signals the whole process group, but the rank decides when its workers end.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
