"""The loader: each slot of the sampler read, pinned and brought to the device."""

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

from trainer import handles, stacks
from trainer.data import batch as batches
from trainer.data.bad import received
from trainer.data.reading import KeyedSamples, Micro
from trainer.data.sampler import MicroBatchSampler
from trainer.faults import Faults
from trainer.log import Log


class Source(Protocol):
    """Where a rank's micro-batches come from, in their order."""

    def __next__(self) -> Micro:
        """The next one."""
        ...

    def next_epoch(self) -> None:
        """The window read last was none: its epoch was over."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


class SampledSource:
    """The slots of a sampler, read from a map-style data set.

    Args:
        workers: loader processes; 0 reads in this process.
        prefetch: micro-batches ahead, for each worker.
    """

    def __init__(
        self, samples: KeyedSamples, sampler: MicroBatchSampler, *, workers: int, prefetch: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._iterator: Iterator[Micro]
        if workers:
            self._iterator = iter(
                DataLoader(samples, sampler=sampler, **reading(workers, prefetch, device)))
        else:  # a DataLoader would take as long as the reading itself
            self._iterator = map(samples.__getitem__, sampler)
            if device.type == "cuda":
                self._iterator = map(Micro.pin_memory, self._iterator)

    def __next__(self) -> Micro:
        return received(next(self._iterator))

    def next_epoch(self) -> None:
        raise AssertionError("the sampler gives whole epochs only: each of its windows counts")

    def close(self) -> None:
        shut_down(self._iterator)


class Loader:
    """The micro-batches of this rank, window by window, with the next ones made ready.

    Args:
        device: where the batches go; on CUDA they are copied by a stream of their own.
        log: told once of each bad sample.
        at_once: read a window whole before its first forward. Where nothing reads ahead that is
            faster: after a forward the processor's caches hold nothing of the reading any more.
    """

    def __init__(self, source: Source, *, device: torch.device, faults: Faults, log: Log,
                 at_once: bool = False) -> None:
        self.waited_s = 0.0
        """Seconds spent waiting for data so far."""
        self._source = source
        self._device, self._on_host = device, device.type == "cpu"
        self._at_once = at_once and self._on_host
        self._faults = faults
        self._log = log
        self._told: set[Any] = set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: Micro | None = None
        self.read: list[Micro] = []
        """What was read for the last window, on the host: to look at if it turns out bad."""
        self._next_step: int | None = None

    def window(self) -> Iterator[Micro]:
        """The micro-batches of the next step; the last one has `slot.last`."""
        del self.read[: len(self.read) - (self._ahead is not None)]
        if self._at_once:
            micros = [self.peek()]
            while not micros[-1].slot.last:
                micros.append(self._read())
            self._ahead = None
            yield from micros
            return
        while True:
            micro, self._ahead = self._ahead or self._read(), None
            if self._stream is not None:
                self._arrive(micro)
                if not micro.slot.last:
                    self._ahead = self._read()  # its copy runs beside this one's computation
            yield micro
            if micro.slot.last:
                return

    def peek(self) -> Micro:
        """The next micro-batch, without taking it."""
        if self._ahead is None:
            self._ahead = self._read()
        if self._stream is not None:
            self._arrive(self._ahead)
        return self._ahead

    def next_epoch(self) -> None:
        """The window just read was none, since the epoch of a stream had ended: begin the next.

        Raises:
            ConfigError: the epoch had no window at all.
        """
        assert self._ahead is None, "only the rest of a window is read ahead"
        self._source.next_epoch()

    def reopen(self, make: Callable[[], Source]) -> None:
        """End the loader's processes, and read from another source: another place in the run."""
        self.close()
        self._ahead = self._next_step = None
        self.read.clear()
        self._source = make()

    def close(self) -> None:
        """End the loader's processes."""
        self._source.close()

    def _read(self) -> Micro:
        start = time.perf_counter()
        self._faults.pulse.beat("reading", self._next_step)
        micro = next(self._source)
        self._next_step = micro.slot.step + micro.slot.last
        if micro.replaced:
            self._tell(micro)
        self._faults.at("data", step=micro.slot.step, epoch=micro.slot.epoch)
        self.waited_s += time.perf_counter() - start
        self.read.append(micro)
        if self._on_host:
            return micro
        if self._stream is None:
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))
        with torch.cuda.stream(self._stream):
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))

    def _tell(self, micro: Micro) -> None:
        for bad in micro.replaced:
            if bad.index in self._told:
                continue
            self._told.add(bad.index)
            worker = "" if bad.worker is None else f", loader worker {bad.worker}"
            self._log.warning(f"bad sample {bad.index} (epoch {bad.epoch}, rank {self._log.rank}"
                              f"{worker}): {bad.why}; sample {bad.by} takes its place")
            self._log.event("bad-sample", index=bad.index, epoch=bad.epoch, worker=bad.worker,
                            exception=bad.why, replaced_by=bad.by, at_step=micro.slot.step)

    def _arrive(self, micro: Micro) -> None:
        """Let the computation's stream wait for the copy, and the allocator know of its use."""
        assert self._stream is not None
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        for tensor in batches.tensors(micro.batch):
            tensor.record_stream(current)


def reading(workers: int, prefetch: int, device: torch.device) -> dict[str, Any]:
    """The DataLoader's arguments for a `KeyedSamples`, which makes whole batches itself."""
    return {
        "batch_size": None,
        "collate_fn": _unchanged,
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        # A rank born of a fork server would start a second server for its workers.
        "multiprocessing_context": "fork" if workers else None,
        "worker_init_fn": partial(_start_worker, os.getpid()) if workers else None,
        "pin_memory": device.type == "cuda",
        "generator": torch.Generator(),  # else iter() draws from the process-wide one
    }


def shut_down(iterator: object) -> None:
    """End the processes behind a DataLoader's iterator, if there are any."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()


def _unchanged(micro: Any) -> Any:
    return micro


def _start_worker(rank: int, number: int) -> None:
    """In each loader process: gone with its rank (a process), deaf to stop signals, one thread,
    its own places in the files that the data set has open."""
    if sys.platform == "linux":
        # It has inherited the rank's sockets: alive, it would hide the rank's death from the peers.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != rank:
        os._exit(0)
    handles.part()
    torch.set_num_threads(1)
    stacks.prepare_worker(number)
    # Before the first batch is put there, which starts the queue's thread.
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = partialmethod(_tell_loss, number)
    ForkingPickler.register(torch.Tensor, _hand_over)
    ForkingPickler.register(torch.UntypedStorage, _hand_over_storage)
    # A launcher signals the whole process group: the rank decides when its workers end.
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(stop, signal.SIG_IGN)
    if sys.platform == "linux":
        # The socket over which it hands tensors on: a name that ends with it, however it ends,
        # in place of a folder in the temporary folder.
        name = f"\0trainer-{uuid.uuid4()}"
        multiprocessing.connection.arbitrary_address = lambda _: name  # type: ignore[attr-defined]


def _tell_loss(queue: Any, worker: int, error: Exception, item: Any) -> None:
    """In a loader process: a batch can't be handed over, for want of shared memory, or since it
    holds what can't be pickled. Python would print that and drop it, and the rank would wait for
    it without end: the error takes its place, under the same number."""
    for name in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):  # torch leaves it there then
        name.unlink(missing_ok=True)
    if isinstance(item, tuple):
        queue.put((item[0], ExceptionWrapper(where=f"in DataLoader worker process {worker}")))


def _hand_over(tensor: torch.Tensor) -> Any:
    """How a loader process sends a tensor: as torch does, which forgets that one is a conjugate or
    negative view of its memory."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return reductions.reduce_tensor(tensor)


def _hand_over_storage(storage: torch.UntypedStorage) -> Any:
    """How it sends the memory of tensors: a small one's bytes, others as torch does. Which tensors
    share it is told beside it in both cases."""
    small = 0 < storage.nbytes() <= batches.SMALL
    if not small or storage.device.type != "cpu" or storage.is_shared():
        return reductions.reduce_storage(storage)
    return _with_bytes, (ctypes.string_at(storage.data_ptr(), storage.nbytes()),)


def _with_bytes(data: bytes) -> torch.UntypedStorage:
    """Memory of this process's own, aligned as torch's allocator does, with these bytes."""
    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage
