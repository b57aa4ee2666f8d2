"""The loader: each slot of the sampler read, keyed, collated, pinned and brought to the device."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from trainer import rng, stacks
from trainer.data import batch as batches
from trainer.data.sampler import MicroBatchSampler, Slot
from trainer.faults import Faults


@dataclass(frozen=True)
class Micro:
    """A micro-batch, ready: its slot, its batch, and the samples in it."""

    slot: Slot
    batch: Any

    @property
    def samples(self) -> int:
        """How many samples it holds; 0 for an empty one."""
        return len(self.slot.indices)

    def pin_memory(self) -> Micro:
        """Called by the DataLoader's pinning."""
        pinned = batches.map_tensors(lambda t: t.pin_memory(), self.batch)
        return dataclasses.replace(self, batch=pinned)


class SampleIndices(list[int]):
    """What a data set's `__getitems__` gets: indices that know their epoch and random keys."""

    def __init__(self, indices: Iterable[int], epoch: int, keys: np.ndarray) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.keys = keys


class SampleError(RuntimeError):
    """A data set raised while one of its samples was read; names sample, epoch and worker."""


class KeyedSamples(Dataset[Micro]):
    """A map-style data set, read slot by slot with every random draw keyed by its sample.

    Through a `Subset` the data set inside is read itself: the subset would ask it for many samples
    at once, without their keys. They stay those of the samples' places in the subset.

    Args:
        augment: whether `__getitems__` is given keys; without them it augments nothing.
    """

    def __init__(
        self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] = batches.collate,
        augment: bool = True,
    ) -> None:  # fmt: skip
        self._dataset = dataset
        self._inner, self._maps = _inside(dataset)
        self._batched = hasattr(self._inner, "__getitems__")
        self._seed = seed
        self._collate = collate
        self._augment = augment
        self._epoch: int | None = None
        self._generators: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, slot: Slot) -> Micro:
        if slot.epoch != self._epoch:
            self._epoch = slot.epoch
            for dataset in _nested(self._dataset):
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(slot.epoch)
        if not slot.indices:
            return Micro(slot, batches.empty(self._read((0,), slot.epoch)))
        return Micro(slot, self._read(slot.indices, slot.epoch))

    def sample(self, index: int) -> Any:
        """One sample of epoch 0, as the data set gives it."""
        self._key(0, index)
        return self._inner[self._place(index)]

    def _read(self, indices: tuple[int, ...], epoch: int) -> Any:
        if self._batched:
            base = rng.mix(self._seed, rng.SAMPLE, epoch)
            keys = rng.mix_array(base, np.asarray(indices, dtype=np.int64))
            self._key(epoch, indices[0])
            with _named_sample(indices, epoch):
                wanted = [self._place(index) for index in indices]
                if self._augment:
                    wanted = SampleIndices(wanted, epoch, keys)
                found = self._inner.__getitems__(wanted)
            return self._collated(found, indices, epoch) if isinstance(found, list) else found
        samples = []
        for index in indices:
            self._key(epoch, index)
            with _named_sample((index,), epoch):
                samples.append(self._inner[self._place(index)])
        return self._collated(samples, indices, epoch)

    def _place(self, index: int) -> Any:
        """Of a sample of the whole, its index in the data set that is read."""
        place: Any = index
        for indices in self._maps:
            place = indices[place]
        return place.item() if isinstance(place, torch.Tensor | np.generic) else place

    def _collated(self, samples: list[Any], indices: tuple[int, ...], epoch: int) -> Any:
        with _named_sample(indices, epoch, doing="collating"):
            return self._collate(samples)

    def _key(self, epoch: int, index: int) -> None:
        if self._generators is None:
            self._generators = rng.own_generators(self._dataset)
        rng.key_generators(self._seed, rng.SAMPLE, epoch, index, devices=False)
        if self._generators:
            rng.key_object(self._generators, self._seed, rng.SAMPLE, epoch, index)


class _named_sample:
    """Errors inside name the sample that was read, and the loader worker."""

    def __init__(self, indices: tuple[int, ...], epoch: int, doing: str = "reading") -> None:
        self._indices, self._epoch, self._doing = indices, epoch, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            info = torch.utils.data.get_worker_info()
            place = "" if info is None else f" in loader worker {info.id}"
            which = (f"sample {self._indices[0]}" if len(self._indices) == 1
                     else f"samples {list(self._indices)}")
            raise SampleError(f"{self._doing} {which} of epoch {self._epoch}{place} raised "
                              f"{type(error).__name__}: {error}") from error


def _nested(dataset: Any) -> Iterator[Any]:
    """A data set, and those inside of it where it is a `Subset`."""
    yield dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
        yield dataset


def _inside(dataset: Any) -> tuple[Any, list[Sequence[Any]]]:
    """The data set within plain `Subset`s, and the indices of each, the outermost first."""
    maps = []
    for layer in _nested(dataset):
        kind = type(layer)
        if not isinstance(layer, Subset) or (kind.__getitem__, kind.__getitems__) != (
                Subset.__getitem__, Subset.__getitems__):  # it does more than to choose
            break
        maps.append(layer.indices)
        dataset = layer.dataset
    return dataset, maps


def in_memory(dataset: Any) -> bool:
    """Whether reading is so cheap that loader processes only add the cost of handing over."""
    *_, dataset = _nested(dataset)
    return hasattr(dataset, "__getitems__") or isinstance(dataset, TensorDataset)


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
        self._iterator = iter(
            DataLoader(samples, sampler=sampler, **reading(workers, prefetch, device))
        )

    def __next__(self) -> Micro:
        return next(self._iterator)

    def next_epoch(self) -> None:
        raise AssertionError("the sampler gives whole epochs only: each of its windows counts")

    def close(self) -> None:
        shut_down(self._iterator)


class Loader:
    """The micro-batches of this rank, window by window, with the next ones made ready.

    Args:
        device: where the batches go; on CUDA they are copied by a stream of their own.
    """

    def __init__(self, source: Source, *, device: torch.device, faults: Faults) -> None:
        self.waited_s = 0.0
        """Seconds spent waiting for data so far."""
        self._source = source
        self._device = device
        self._faults = faults
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: Micro | None = None
        self._next_step: int | None = None

    def window(self) -> Iterator[Micro]:
        """The micro-batches of the next step; the last one has `slot.last`."""
        while True:
            micro = self._take()
            self._arrive(micro)
            if self._stream is not None and not micro.slot.last:
                self._ahead = self._read()  # its copy runs beside this one's computation
            yield micro
            if micro.slot.last:
                return

    def peek(self) -> Micro:
        """The next micro-batch, without taking it."""
        if self._ahead is None:
            self._ahead = self._read()
        self._arrive(self._ahead)
        return self._ahead

    def next_epoch(self) -> None:
        """The window just read was none, since the epoch of a stream had ended: begin the next.

        Raises:
            ConfigError: the epoch had no window at all.
        """
        assert self._ahead is None, "only the rest of a window is read ahead"
        self._source.next_epoch()

    def close(self) -> None:
        """End the loader's processes."""
        self._source.close()

    def _take(self) -> Micro:
        micro, self._ahead = self._ahead, None
        return micro if micro is not None else self._read()

    def _read(self) -> Micro:
        start = time.perf_counter()
        self._faults.pulse.beat("reading", self._next_step)
        micro = next(self._source)
        self._next_step = micro.slot.step + micro.slot.last
        self.waited_s += time.perf_counter() - start
        self._faults.at("data", step=micro.slot.step, epoch=micro.slot.epoch)
        if self._device.type == "cpu":
            return micro
        if self._stream is None:
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))
        with torch.cuda.stream(self._stream):
            return dataclasses.replace(micro, batch=batches.to_device(micro.batch, self._device))

    def _arrive(self, micro: Micro) -> None:
        """Let the computation's stream wait for the copy, and the allocator know of its use."""
        if self._stream is not None:
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
        "worker_init_fn": _start_worker if workers else None,
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


def _start_worker(number: int) -> None:
    """In each loader process: one thread, deaf to stop signals, and gone with its rank."""
    torch.set_num_threads(1)
    stacks.prepare_worker(number)
    # A launcher signals the whole process group: the rank decides when its workers end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    # It has inherited the rank's sockets: alive, it would hide the rank's death from the peers.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(0)
