"""Data loader: the micro-batches of this rank, window by window, copied to the device."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.stream import StreamReader
from trainer.data.workers import DataReader
from trainer.resilience.progress_marks import ProgressMarks
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase

MicroBatchSource = DataReader | StreamReader


class Loader:
    """Yields the micro-batches of this rank; on CUDA they are copied ahead on a separate stream.

    Args:
        at_once: read the whole window before its first forward pass. Without loader workers that is
            faster: a forward pass evicts the data of reading from the CPU caches.
    """

    def __init__(self, source: MicroBatchSource, *, device: torch.device, marks: ProgressMarks,
                 log: Log, at_once: bool = False) -> None:
        self.waited_s = 0.0  # total seconds spent waiting for data
        self.read: list[MicroBatch] = []
        """The micro-batches of the last window, on the host, for the diagnosis of a bad step."""
        self._source, self._device = source, device
        self._at_once = at_once and device.type == "cpu"
        self._marks, self._log = marks, log
        self._reported: set[Any] = set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: MicroBatch | None = None
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
            micro, self._ahead = self.peek(), None
            if self._stream is not None and not micro.spec.last:
                self._ahead = self._read()  # its copy overlaps with this one's computation
            yield micro
            if micro.spec.last:
                return

    def peek(self) -> MicroBatch:
        """Return the next micro-batch without consuming it."""
        if self._ahead is None:
            self._ahead = self._read()
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)  # for the copy
            for tensor in batches.tensors(self._ahead.batch):
                tensor.record_stream(current)
        return self._ahead

    def forget_wait(self) -> None:
        """Do not count the time spent waiting so far."""
        self.waited_s = 0.0

    def next_epoch(self) -> None:
        """Drop the window just read, because the epoch of a stream had ended; begin the next epoch.
        """
        assert self._ahead is None, "prefetching never goes beyond the current window"
        assert isinstance(self._source, StreamReader), "a sampler yields whole epochs only"
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
        self._report_replaced(micro)
        self._marks.mark(Phase.DATA, micro.spec.step, micro.spec.epoch)
        self.waited_s += time.perf_counter() - start
        self.read.append(micro)
        if self._device.type == "cpu":
            return micro
        # `peek` can't reserve the tensors inside objects for the stream on which they are used.
        ahead = self._stream is not None and not batches.has_objects(micro.batch)
        with torch.cuda.stream(self._stream) if ahead else contextlib.nullcontext():
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
