"""Read and collate samples of a map-style data set, with random draws keyed per sample."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from trainer import rng
from trainer.data import batch as batches
from trainer.data.sample_errors import (
    ReplacedSample,
    SampleError,
    as_sample_error,
    raise_or_return,
    summarize_exception,
    this_worker,
)
from trainer.data.sampler import Draw, MicroBatchSpec
from trainer.resilience.diagnosis import is_shortage

TRIES = 10
"""Number of replacement candidates tried for a bad sample."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch: its specification, the collated batch, and the bad samples replaced in it. The
    batch of one without samples is a stand-in, which has no effect (distributed/stand_in.py)."""

    spec: MicroBatchSpec
    batch: Any
    replaced: tuple[ReplacedSample, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples that count; 0 for a stand-in."""
        return len(self.spec.indices)

    def pin_memory(self) -> MicroBatch:
        """Called by the DataLoader."""
        return dataclasses.replace(self, batch=batches.pin_memory(self.batch))


class SampleIndices(list[int]):
    """The argument of a data set's `__getitems__`: a list of indices, with the epoch."""

    def __init__(self, indices: Iterable[int], epoch: int, keys: Callable[[], np.ndarray]) -> None:
        super().__init__(indices)
        self.epoch, self._make_keys = epoch, keys

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """A random key for each sample (uint64), made when a data set that augments asks for it."""
        return self._make_keys()


class KeyedSamples(Dataset[MicroBatch]):
    """Reads a map-style data set by micro-batch, with every random draw keyed by its sample.

    The data set inside a `Subset` is read directly, because the subset would call its
    `__getitems__` without keys. The keys are those of the samples' positions in the subset.

    A sample is bad if reading it raises, or if its micro-batch can't be collated and collating the
    sample alone raises too. With `skip` it is replaced, otherwise a `SampleError` is raised. The
    replacement is a function of (seed, epoch, sample) and is read with its own key, so the batch
    equals that of a sampler that had chosen the replacement.

    Args:
        augment: whether `__getitems__` receives keys; without keys it does not augment.
        same_draws: whether `collate`, or `__getitems__`, draws the same numbers for each batch.
        advice: appended to the error message of a single bad sample.
    """

    def __init__(
        self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] = batches.collate,
        augment: bool = True, skip: bool = False, rank: int = 0, advice: str = "",
        same_draws: bool = False,
    ) -> None:  # fmt: skip
        self._dataset, self._seed, self._collate, self._augment = dataset, seed, collate, augment
        self._same_draws = same_draws
        self._inner, self._maps = _inside(dataset)
        self._batched = hasattr(self._inner, "__getitems__")
        self._skip, self._rank, self._advice = skip, rank, advice
        self._epoch: int | None = None
        self._listeners: list[int] = []
        self._generators: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, spec: MicroBatchSpec) -> MicroBatch:
        self._begin(spec.epoch)
        why: dict[int, str] = {}
        worker = this_worker()
        try:
            batch, chosen = self._read(spec.indices or spec.stand_in, spec.epoch, why)
        except SampleError as error:
            return raise_or_return(  # type: ignore[return-value]
                error, rank=self._rank, worker=worker, advice=self._advice)
        if chosen is spec.indices or not spec.indices:
            return MicroBatch(spec, batch)
        return MicroBatch(spec, batch, tuple(
            ReplacedSample(index=self._place(index), by=self._place(by), epoch=spec.epoch,
                           why=why[index], worker=worker)
            for index, by in zip(spec.indices, chosen, strict=True) if index != by))

    def sample(self, index: int) -> Any:
        """One sample of epoch 0, as returned by the data set."""
        self._begin(0)
        try:
            return self._choose(index, 0, lambda one, epoch: self._one(*one, epoch), {})[1]
        except SampleError as error:
            return raise_or_return(error, rank=self._rank, advice=self._advice)

    def _begin(self, epoch: int) -> None:
        if epoch != self._epoch or any(_EPOCHS[i] != epoch for i in self._listeners):
            self._epoch = epoch
            self._listeners = begin_epoch(self._dataset, epoch, seed=self._seed)
            self._generators = None  # set_epoch may have created others

    def _read(
        self, indices: tuple[int, ...], epoch: int, why: dict[int, str]
    ) -> tuple[Any, tuple[int, ...]]:
        """The batch of these samples, and the indices it really contains. If it can't be made, each
        sample is tried alone, to find the bad ones; `why` gets the errors of replaced samples."""
        chosen, alone = indices, self._samples
        for _ in range(2):  # samples that can't be read, and then those that can't be collated
            try:
                samples = self._samples(chosen, epoch)
                alone = self._batch
                return self._collated(samples, chosen, epoch), chosen
            except SampleError:
                fitting = tuple(self._choose(index, epoch, alone, why)[0] for index in indices)
                if fitting == chosen and not self._skip:
                    raise  # they fail only together
                chosen = fitting
        return self._batch(chosen, epoch), chosen

    def _choose(
        self, index: int, epoch: int, use: Callable[[tuple[int], int], Any], why: dict[int, str]
    ) -> tuple[int, Any]:
        """`index`, or the first replacement for which `use` doesn't raise, and its result."""
        candidates = [index]
        if self._skip:
            candidates += [rng.mix(self._seed, rng.REPLACE, epoch, index, attempt) % len(self)
                           for attempt in range(1, 1 + TRIES)]
        errors = []
        for candidate in candidates:
            try:
                return candidate, use((candidate,), epoch)
            except SampleError as error:
                if is_shortage(error.__cause__) or not isinstance(error.__cause__, Exception):
                    raise  # not the sample's fault
                errors.append(error)
                why[index] = summarize_exception(errors[0].__cause__)
        if self._skip:
            raise SampleError(f"{errors[0]}, and so did the {TRIES} samples that were tried in its "
                              "place") from errors[0].__cause__
        errors[0].single = True
        raise errors[0]

    def _batch(self, indices: tuple[int, ...], epoch: int) -> Any:
        """The batch of exactly these samples."""
        return self._collated(self._samples(indices, epoch), indices, epoch)

    def _samples(self, indices: tuple[int, ...], epoch: int) -> Any:
        """The list of exactly these samples, or the complete batch of `__getitems__`."""
        if not self._batched:
            return [self._one(index, epoch) for index in indices]
        self._key(epoch, 0 if self._same_draws else indices[0])
        with self._named(indices, epoch):
            wanted = [self._place(index) for index in indices] if self._maps else list(indices)
            if self._augment:
                wanted = SampleIndices(wanted, epoch, lambda: rng.mix_array(
                    rng.mix(self._seed, rng.SAMPLE, epoch), np.array([*map(_key_of, indices)])))
            read = self._inner.__getitems__(wanted)
            if isinstance(read, list) and len(read) != len(indices):
                raise ValueError(f"__getitems__ was called with {len(indices)} indices and "
                                 f"returned {len(read)} samples; it must return one sample per "
                                 "index, in the same order")
            # A complete batch may be in memory that the next call fills again.
            return read if isinstance(read, list) else batches.copy_of(read)

    def _one(self, index: int, epoch: int) -> Any:
        self._key(epoch, index)
        with self._named((index,), epoch):
            return self._inner[self._place(index)]

    def _collated(self, samples: Any, indices: tuple[int, ...], epoch: int) -> Any:
        if not isinstance(samples, list):
            return samples
        if self._same_draws and not self._batched:
            self._key(epoch, 0)
        with self._named(indices, epoch, "collating"):
            return batches.collated(self._collate, samples)

    def _place(self, index: int) -> Any:
        """Map an index through the subsets to the index in the data set that is read."""
        place: Any = int(index)
        for indices in self._maps:
            place = indices[place]
        return place.item() if isinstance(place, torch.Tensor | np.generic) else place

    def _key(self, epoch: int, index: int) -> None:
        if self._generators is None:
            self._generators = rng.find_generators(self._dataset, self._collate)
        keys = self._seed, rng.SAMPLE, epoch, _key_of(index)
        rng.seed_all(*keys, devices=False)
        if self._generators:
            rng.key(self._generators, *keys)

    def _named(
        self, indices: tuple[int, ...], epoch: int, doing: str = "reading"
    ) -> AbstractContextManager[None]:
        def what() -> str:
            single = len(indices) == 1
            places = [self._place(index) for index in indices]
            which = f"sample {places[0]}" if single else f"samples {places}"
            if self._maps:
                which += f" (in the subset: {indices[0] if single else list(indices)})"
            return f"{doing} {which} of epoch {epoch}"

        return as_sample_error(what)


def _key_of(index: int) -> int:
    """What the random draws of a sample are keyed by."""
    return index.place if isinstance(index, Draw) else index


_EPOCHS: dict[int, int] = {}
"""The id of a data set → the last epoch this process passed to its `set_epoch`. Several readers may
share a data set, such as those of a training and a validation subset."""


def begin_epoch(dataset: Any, epoch: int, *, seed: int) -> list[int]:
    """Call `set_epoch` on a data set, and on those combined in it by torch's own classes; return
    the ids of those that have the method. Its random draws (such as an order) are keyed: equal on
    all ranks and after a restart."""
    queue, listeners = [dataset], []
    for one in queue:
        if hasattr(one, "set_epoch"):
            listeners.append(one)
        if isinstance(one, Subset):
            queue.append(one.dataset)
        elif isinstance(one, ConcatDataset | ChainDataset):
            queue += one.datasets
        elif isinstance(one, StackDataset):
            queue += one.datasets.values() if isinstance(one.datasets, dict) else one.datasets
    if listeners:
        rng.seed_all(seed, rng.DATA, epoch, devices=False)
        rng.key(rng.find_generators(dataset), seed, rng.DATA, epoch)
    for one in listeners:
        one.set_epoch(epoch)
        _EPOCHS[id(one)] = epoch
    return [id(one) for one in listeners]


class Limited(Subset[Any]):
    """The first samples of the data set of a task, by --data.limit."""


def _inside(dataset: Any) -> tuple[Any, list[Sequence[Any]]]:
    """The data set inside plain `Subset`s, and the indices of each subset, outermost first."""
    maps = []
    while isinstance(dataset, Subset) and (
            type(dataset).__getitem__ is Subset.__getitem__
            and type(dataset).__getitems__ is Subset.__getitems__):  # it only selects samples
        maps.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, maps


def in_memory(dataset: Any) -> bool:
    """Whether reading is cheap enough that loader processes would only add transfer cost."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__") or isinstance(dataset, TensorDataset)


def shared_samples(train: Any, validation: Any) -> str:
    """The evidence that validation samples are training samples, or ""; compares the indices of two
    `Subset`s of one data set, and the tensors of `TensorDataset`s."""
    shared = 0
    if isinstance(train, Subset) and isinstance(validation, Subset):
        both = np.isin(np.asarray(validation.indices), np.asarray(train.indices))
        shared = int(both.sum()) if train.dataset is validation.dataset else 0
    elif isinstance(train, TensorDataset) and isinstance(validation, TensorDataset):
        equal = all(map(torch.equal, train.tensors, validation.tensors))
        shared = len(validation) if equal else 0
    return (f"{shared:,} of {len(validation):,} validation samples are among the training samples: "
            "the scores are too good") if shared else ""
