"""Reading a map-style data set: the samples of a slot, each under its own random keys, collated."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from trainer import rng
from trainer.data import batch as batches
from trainer.data.sampler import Slot
from trainer.errors import TooManyBadSamples

T = TypeVar("T")

TRIES = 10
"""How many samples are tried in the place of a bad one."""

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


@dataclass(frozen=True)
class Micro:
    """A micro-batch, ready: its slot, its batch, and the samples in it."""

    slot: Slot
    batch: Any
    replaced: tuple[Replaced, ...] = ()
    """Which of the slot's samples gave way to others."""

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
    """A data set raised while one of its samples was read; says which, where, and how to go on."""

    single = False
    """Whether it is the error of one sample alone, and not of a whole micro-batch."""
    trace = ""
    """The traceback of what was raised, where that was in a loader worker."""


class KeyedSamples(Dataset[Micro]):
    """A map-style data set, read slot by slot with every random draw keyed by its sample.

    Through a `Subset` the data set inside is read itself: the subset would ask it for many samples
    at once, without their keys. They stay those of the samples' places in the subset.

    A sample is bad if reading it raises, or collating it alone where its micro-batch can't be
    collated. What is read in its place is a function of (seed, epoch, sample), and is read as it
    would be in its own place: the batch is the one of a sampler that had chosen so.

    Args:
        augment: whether `__getitems__` is given keys; without them it augments nothing.
        skip: replace bad samples; otherwise they raise a `SampleError` (in a loader worker: are
            one, see `received`).
        rank: told in errors, and after them `advice`.
    """

    def __init__(
        self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] = batches.collate,
        augment: bool = True, skip: bool = False, rank: int = 0, advice: str = "",
    ) -> None:  # fmt: skip
        self._dataset = dataset
        self._inner, self._maps = _inside(dataset)
        self._batched = hasattr(self._inner, "__getitems__")
        self._seed = seed
        self._collate = collate
        self._augment = augment
        self._skip, self._rank, self._advice = skip, rank, advice
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
        why: dict[int, str] = {}
        worker = _worker()
        try:
            batch, chosen = self._read(slot.indices or (0,), slot.epoch, why)
        except SampleError as error:
            return hand_over(error, rank=self._rank, worker=worker,  # type: ignore[return-value]
                             advice=self._advice)
        if not slot.indices:
            return Micro(slot, batches.empty(batch))
        return Micro(slot, batch, tuple(
            Replaced(index=self._place(index), by=self._place(by), epoch=slot.epoch,
                     why=why[index], worker=worker)
            for index, by in zip(slot.indices, chosen, strict=True) if index != by))

    def sample(self, index: int) -> Any:
        """One sample of epoch 0, as the data set gives it."""
        try:
            return self._choose(index, 0, lambda i: self._one(i, 0), {})[1]
        except SampleError as error:
            return hand_over(error, rank=self._rank, worker=None, advice=self._advice)

    def _read(
        self, indices: tuple[int, ...], epoch: int, why: dict[int, str]
    ) -> tuple[Any, tuple[int, ...]]:
        """The batch of these samples, and the samples that it really holds; `why` is told what
        the others raised."""
        chosen, samples = self._samples(indices, epoch, why)
        if not isinstance(samples, list):
            return samples, chosen  # `__getitems__` made the batch
        try:
            return self._collated(samples, chosen, epoch), chosen
        except SampleError:
            def fits(index: int) -> None:
                self._collated(self._exactly((index,), epoch), (index,), epoch)

            fitting = self._choose_each(indices, epoch, fits, why)
            if fitting == chosen:
                raise
        return self._collated(self._exactly(fitting, epoch), fitting, epoch), fitting

    def _samples(
        self, indices: tuple[int, ...], epoch: int, why: dict[int, str]
    ) -> tuple[tuple[int, ...], Any]:
        """The samples that can be read, and what the data set gives for them."""
        if not self._batched:
            read = [self._choose(i, epoch, lambda i: self._one(i, epoch), why) for i in indices]
            return tuple(index for index, _ in read), [sample for _, sample in read]
        try:
            return indices, self._exactly(indices, epoch)
        except SampleError:
            chosen = self._choose_each(indices, epoch, lambda i: self._exactly((i,), epoch), why)
            if chosen == indices:
                raise
        return chosen, self._exactly(chosen, epoch)

    def _choose_each(
        self, indices: tuple[int, ...], epoch: int, use: Callable[[int], Any], why: dict[int, str]
    ) -> tuple[int, ...]:
        return tuple(self._choose(index, epoch, use, why)[0] for index in indices)

    def _choose(
        self, index: int, epoch: int, use: Callable[[int], T], why: dict[int, str]
    ) -> tuple[int, T]:
        """A sample and what `use` makes of it; where that raises, the first other one that can be
        used."""
        first: SampleError | None = None
        for attempt in range(1 + TRIES if self._skip else 1):
            candidate = index
            if attempt:
                key = rng.mix(self._seed, rng.REPLACE, epoch, index, attempt)
                candidate = key % len(self)
            try:
                return candidate, use(candidate)
            except SampleError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise  # it says nothing of the sample
                if first is None:
                    first = error
                    why[index] = _brief(error.__cause__)
        assert first is not None
        if self._skip:
            raise SampleError(f"{first}, and so did the {TRIES} samples that were tried in its "
                              "place") from first.__cause__
        first.single = True
        raise first

    def _one(self, index: int, epoch: int) -> Any:
        self._key(epoch, index)
        with self._named((index,), epoch):
            return self._inner[self._place(index)]

    def _exactly(self, indices: tuple[int, ...], epoch: int) -> Any:
        """What the data set gives for these samples and no others."""
        if not self._batched:
            return [self._one(index, epoch) for index in indices]
        base = rng.mix(self._seed, rng.SAMPLE, epoch)
        keys = rng.mix_array(base, np.asarray(indices, dtype=np.int64))
        self._key(epoch, indices[0])
        with self._named(indices, epoch):
            wanted = [self._place(index) for index in indices]
            if self._augment:
                wanted = SampleIndices(wanted, epoch, keys)
            return self._inner.__getitems__(wanted)

    def _place(self, index: int) -> Any:
        """Of a sample of the whole, its index in the data set that is read."""
        place: Any = index
        for indices in self._maps:
            place = indices[place]
        return place.item() if isinstance(place, torch.Tensor | np.generic) else place

    def _collated(self, samples: list[Any], indices: tuple[int, ...], epoch: int) -> Any:
        with self._named(indices, epoch, "collating"):
            return self._collate(samples)

    def _key(self, epoch: int, index: int) -> None:
        if self._generators is None:
            self._generators = rng.own_generators(self._dataset)
        rng.key_generators(self._seed, rng.SAMPLE, epoch, index, devices=False)
        if self._generators:
            rng.key_object(self._generators, self._seed, rng.SAMPLE, epoch, index)

    def _named(self, indices: tuple[int, ...], epoch: int, doing: str = "reading") -> named:
        def what() -> str:
            places = [self._place(index) for index in indices]
            which = f"sample {places[0]}" if len(places) == 1 else f"samples {places}"
            if self._maps:
                own = indices[0] if len(indices) == 1 else list(indices)
                which += f" (in the subset: {own})"
            return f"{doing} {which} of epoch {epoch}"

        return named(what)


class named:
    """Errors inside say what was being done."""

    def __init__(self, doing: str | Callable[[], str]) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            doing = self._doing if isinstance(self._doing, str) else self._doing()
            raise SampleError(f"{doing} raised {_brief(error)}") from error


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


def _brief(error: BaseException | None) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _worker() -> int | None:
    info = get_worker_info()
    return None if info is None else info.id


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
