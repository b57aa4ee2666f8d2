"""What streams that are stored in files have in common: lists of files, keys, shuffling."""

from __future__ import annotations

import copy
import glob
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.data.order import KeyedPermutation
from trainer.errors import ConfigError

Transform = Callable[[Any], Any]


class KeyedStream(IterableDataset[Any]):
    """Base of streams in lanes whose order is a function of `key`, another one in each epoch.

    A lane is an iterator with a `state_dict`. One whose attribute `draws` is False draws from no
    random generator: for small samples, keying them takes longer than reading.
    """

    key = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer, which keys the generators by (seed, epoch) before."""
        self.key = int(torch.randint(1 << 62, ()))

    def lane(self, number: int, lanes: int) -> Iterator[Any]:
        """The samples of a lane from 0 to `lanes` - 1; together the lanes are the epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.lane(0, 1)


class ShuffledBlocks(KeyedStream):
    """Shuffles a stream in lanes, block by block: an exact alternative to a shuffle buffer.

    A lane reads `size` samples and yields them in an order that follows from the seed, the epoch
    and the place. A resumed lane reads the current block again: at most `size` samples.

    Args:
        stream: a data set with `lane(number, lanes)`, whose iterators have a `state_dict`.
        size: samples in a block, all of which a lane holds in memory.
        transform: applied to each sample after the shuffle, such as the decoder of an image: the
            block then holds bytes, not pixels.
    """

    def __init__(self, stream: Any, size: int, transform: Transform | None = None) -> None:
        if size < 1:
            raise ConfigError(f"ShuffledBlocks: size {size}: use 1 or more.")
        self.stream, self.size, self.transform = stream, size, transform

    def __len__(self) -> int:
        return len(self.stream)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def lane(self, number: int, lanes: int) -> ShuffledLane:
        return ShuffledLane(self, self.stream.lane(number, lanes), rng.mix(self.key, number))


class ShuffledLane(Iterator[Any]):
    """A lane of `ShuffledBlocks`. Its state is that of the source at the start of a block, the
    number of the block and of the samples taken from it."""

    def __init__(self, shuffled: ShuffledBlocks, source: Any, key: int) -> None:
        self._shuffled, self._source, self._key = shuffled, source, key
        self._iterator = iter(source)
        self._stateful = self._iterator if hasattr(self._iterator, "state_dict") else source
        if not hasattr(self._stateful, "load_state_dict"):
            raise ConfigError(f"ShuffledBlocks: a lane of {type(shuffled.stream).__name__} is a "
                              f"{type(source).__name__} without state_dict and load_state_dict; "
                              "define them.")
        self._number, self._taken = -1, 0
        self._start: Any = None
        """State of the source at the start of the block; None before the first block."""
        self._block: list[Any] = []

    def __next__(self) -> Any:
        if self._taken == len(self._block):
            self._begin(self._number + 1, copy.deepcopy(self._stateful.state_dict()))
        self._taken += 1
        sample = self._block[self._taken - 1]
        transform = self._shuffled.transform
        return sample if transform is None else transform(sample)

    def _begin(self, number: int, start: Any) -> None:
        """Read a block from the source's position, whose state is `start`."""
        key = rng.mix(self._key, number)
        # A resumed lane reads the block again, under the key of another sample: the draws of
        # reading follow from the block alone, and those of `transform` from the sample alone.
        with rng.preserved():
            rng.seed_all(key, devices=False)
            rng.key(rng.find_generators(self._shuffled.stream, self._source), key)
            read = list(itertools.islice(self._iterator, self._shuffled.size))
        if not read:
            raise StopIteration
        order = KeyedPermutation(len(read), key)(0, np.arange(len(read)))
        self._block, self._number, self._taken = [read[i] for i in order], number, 0
        self._start = start

    def state_dict(self) -> dict[str, Any]:
        return {"source": self._start, "block": self._number, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["block"] < 0:
            return
        self._stateful.load_state_dict(state["source"])
        if self._stateful is self._source:
            self._iterator = iter(self._source)  # a loaded state applies to the next iterator
        # Not the source's own state: some have none before the first sample after a load.
        self._begin(state["block"], state["source"])
        self._taken = state["taken"]


def check_lanes(stream: str, files: int, lanes: int) -> None:
    """Refuse a stream whose files (shards) are fewer than its lanes."""
    if files < lanes:
        raise ConfigError(f"{stream}: {files} files can't be dealt to {lanes} lanes, the "
                          "micro-batches of a global batch: use a larger --batch.micro-size, a "
                          "smaller --batch.global-size, or more files (Hugging Face: .reshard()).")


def list_files(files: str | Path | Sequence[str | Path], what: str) -> list[Path]:
    """The files of a path or pattern (`data/*.parquet`), or of a list of them, in their order;
    those of a pattern are sorted."""
    found: list[Path] = []
    for one in [files] if isinstance(files, str | Path) else files:
        path = Path(one).expanduser()
        matches = [path] if path.is_file() else [
            match for match in map(Path, sorted(glob.glob(str(path), recursive=True)))
            if match.is_file()]
        if not matches:
            raise ConfigError(f"{what} {one}: there is no such file in {Path.cwd()}; give paths of "
                              "files, or a pattern such as 'data/*'.")
        found += matches
    if not found:
        raise ConfigError(f"{what}: the list of files is empty.")
    return found
