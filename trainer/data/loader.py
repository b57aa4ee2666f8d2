"""Data loader: reads the micro-batches of this rank, pins them and copies them to the device."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing.connection
import multiprocessing.queues
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader

from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, MicroBatch
from trainer.data.sample_errors import raise_if_error
from trainer.data.sampler import MicroBatchSampler
from trainer.resilience import processes, stack_dumps
from trainer.resilience.progress_marks import ProgressMarks
from trainer.resilience.stop_signals import STOP_SIGNALS
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase


class MicroBatchSource(Protocol):
    """Iterator over the micro-batches of a rank."""

    def __next__(self) -> MicroBatch:
        """The next micro-batch."""
        ...

    def next_epoch(self) -> None:
        """Drop the last window, because its epoch had ended, and begin the next epoch."""
        ...

    def close(self) -> None:
        """Stop prefetching and end the loader processes."""
        ...


class SampledSource:
    """Reads the micro-batches of a sampler from a map-style data set.

    Args:
        workers: loader processes; 0 reads in this process.
        prefetch: micro-batches to read ahead, per worker.
    """

    def __init__(
        self, samples: KeyedSamples, sampler: MicroBatchSampler, *, workers: int, prefetch: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._iterator: Iterator[MicroBatch]
        if workers:
            self._iterator = iter(
                DataLoader(samples, sampler=sampler, **loader_arguments(workers, prefetch, device)))
        else:  # a DataLoader's own overhead would be as large as the time for reading
            self._iterator = map(samples.__getitem__, sampler)
            if device.type == "cuda":
                self._iterator = map(MicroBatch.pin_memory, self._iterator)

    def __next__(self) -> MicroBatch:
        return raise_if_error(next(self._iterator))

    def next_epoch(self) -> None:
        raise AssertionError("a sampler yields whole epochs only, so each window is used")

    def close(self) -> None:
        shut_down_workers(self._iterator)


class Loader:
    """Yields the micro-batches of this rank, window by window, with prefetching to the device.

    Args:
        device: target of the batches; on CUDA they are copied on a separate stream.
        log: receives one warning and event per bad sample.
        at_once: read the whole window before its first forward pass. Without loader workers that is
            faster: a forward pass evicts the data of reading from the CPU caches.
    """

    def __init__(self, source: MicroBatchSource, *, device: torch.device, marks: ProgressMarks,
                 log: Log,
                 at_once: bool = False) -> None:
        self.waited_s = 0.0
        """Total seconds spent waiting for data."""
        self._source = source
        self._device, self._on_host = device, device.type == "cpu"
        self._at_once = at_once and self._on_host
        self._marks = marks
        self._log = log
        self._reported: set[Any] = set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: MicroBatch | None = None
        self.read: list[MicroBatch] = []
        """The micro-batches of the last window, on the host, for the diagnosis of a bad step."""
        self._next_step: int | None = None

    def window(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step; the last one has `spec.last` set."""
        del self.read[: len(self.read) - (self._ahead is not None)]
        if self._at_once:
            micro_batches = [self.peek()]
            while not micro_batches[-1].spec.last:
                micro_batches.append(self._read())
            self._ahead = None
            yield from micro_batches
            return
        while True:
            micro, self._ahead = self._ahead or self._read(), None
            if self._stream is not None:
                self._arrive(micro)
                if not micro.spec.last:
                    self._ahead = self._read()  # its copy overlaps with this one's computation
            yield micro
            if micro.spec.last:
                return

    def peek(self) -> MicroBatch:
        """Return the next micro-batch without consuming it."""
        if self._ahead is None:
            self._ahead = self._read()
        if self._stream is not None:
            self._arrive(self._ahead)
        return self._ahead

    def forget_wait(self) -> None:
        """Do not count the time spent waiting so far."""
        self.waited_s = 0.0

    def next_epoch(self) -> None:
        """Drop the window just read, because the epoch of a stream had ended; begin the next epoch.

        Raises:
            ConfigError: the epoch had no complete window.
        """
        assert self._ahead is None, "prefetching never goes beyond the current window"
        self._source.next_epoch()

    def reopen(self, make: Callable[[], MicroBatchSource]) -> None:
        """End the loader processes and read from a new source, at another position of the run."""
        self.close()
        self._ahead = self._next_step = None
        self.read.clear()
        self._source = make()

    def close(self) -> None:
        """End the loader processes."""
        self._source.close()

    def _read(self) -> MicroBatch:
        start = time.perf_counter()
        self._marks.mark(Phase.READING, self._next_step)
        micro = next(self._source)
        self._next_step = micro.spec.step + micro.spec.last
        if micro.replaced:
            self._report_replaced(micro)
        self._marks.mark(Phase.DATA, micro.spec.step, micro.spec.epoch)
        self.waited_s += time.perf_counter() - start
        self.read.append(micro)
        if self._on_host:
            return micro
        if self._stream is None:
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))
        with torch.cuda.stream(self._stream):
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))

    def _report_replaced(self, micro: MicroBatch) -> None:
        for bad in micro.replaced:
            if bad.index in self._reported:
                continue
            self._reported.add(bad.index)
            worker = "" if bad.worker is None else f", loader worker {bad.worker}"
            self._log.warning(f"bad sample {bad.index} (epoch {bad.epoch}, rank {self._log.rank}"
                              f"{worker}): {bad.why}; sample {bad.by} takes its place")
            self._log.event("bad-sample", index=bad.index, epoch=bad.epoch, worker=bad.worker,
                            exception=bad.why, replaced_by=bad.by, at_step=micro.spec.step)

    def _arrive(self, micro: MicroBatch) -> None:
        """Make the current stream wait for the copy, and record the use with the allocator."""
        assert self._stream is not None
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        for tensor in batches.tensors(micro.batch):
            tensor.record_stream(current)


def loader_arguments(workers: int, prefetch: int, device: torch.device) -> dict[str, Any]:
    """Arguments of the DataLoader for a `KeyedSamples`, which returns complete batches itself."""
    return {
        "batch_size": None,
        "collate_fn": _unchanged,
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        # With another start method a rank forked by the launcher's fork server would start a second
        # server for its workers.
        "multiprocessing_context": "fork" if workers else None,
        "worker_init_fn": partial(_start_worker, os.getpid()) if workers else None,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator(),  # otherwise iter() draws from the process-wide generator
    }


def shut_down_workers(iterator: object) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _unchanged(micro: Any) -> Any:
    return micro


def _start_worker(rank: int, number: int) -> None:
    """Set up a loader process.

    It dies with its rank (the process `rank`), ignores stop signals, uses one thread, and has its
    own file offsets in the files that the data set has open.
    """
    if sys.platform == "linux":
        # The worker has inherited the rank's sockets. If it outlived the rank, the peers would not
        # notice the rank's death.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != rank:
        os._exit(0)
    processes.separate_reads()
    torch.set_num_threads(1)
    stack_dumps.prepare_worker(number)
    # Before the first batch is put into the queue, which starts the queue's thread.
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = partialmethod(_send_error_instead, number)
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    # A launcher signals the whole process group, but the rank decides when its workers end.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    if sys.platform == "linux":
        # The socket for sending tensors: an abstract name, which vanishes with the process, instead
        # of a directory in the temporary directory, which a killed process would leave behind.
        name = f"\0trainer-{uuid.uuid4()}"
        multiprocessing.connection.arbitrary_address = lambda _: name  # type: ignore[attr-defined]


def _send_error_instead(queue: Any, worker: int, error: Exception, item: Any) -> None:
    """Send an error in place of a batch that a loader process can't send.

    Sending fails if shared memory is exhausted or an object can't be pickled. Python's queue would
    print the error and drop the item, and the rank would wait forever for it; so the error is sent
    under the same item number.
    """
    for name in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):  # torch leaves the file behind
        name.unlink(missing_ok=True)
    if isinstance(item, tuple):
        queue.put((item[0], ExceptionWrapper(where=f"in DataLoader worker process {worker}")))


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Pickle a tensor in a loader process as torch does, but resolve conjugate and negative views:
    torch's reduction drops these bits."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return reductions.reduce_tensor(tensor)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Pickle a storage in a loader process: small ones by value, others as torch does.

    Tensors that share a storage still share it after unpickling in both cases.
    """
    small = 0 < storage.nbytes() <= batches.SMALL
    if not small or storage.device.type != "cpu" or storage.is_shared():
        return reductions.reduce_storage(storage)
    return _with_bytes, (ctypes.string_at(storage.data_ptr(), storage.nbytes()),)


def _with_bytes(data: bytes) -> torch.UntypedStorage:
    """A storage of this process with these bytes, aligned as by torch's allocator."""
    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage
