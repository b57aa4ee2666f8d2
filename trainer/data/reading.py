"""Reading a map-style data set: the samples of a slot, each under its own random keys, collated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from trainer import rng
from trainer.data import batch as batches
from trainer.data.sampler import Slot


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
