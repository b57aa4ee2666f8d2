"""The task of `tape_task` on streams: in uneven lanes, with and without a state_dict, with and
without a length."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tape_task import Tape, draws, read_tape
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper, Loader, Mapper

from trainer import Outcome
from trainer.distributed.partition import micro_batches_per_rank

LANE = 1000
"""Sample p of lane k has the id LANE * k + p."""


class Whole(IterableDataset):
    """Samples 0, 1, 2, …, rotated by the epoch; each with draws from all kinds of generators."""

    def __init__(self, count: int, width: int, log: str = "") -> None:
        self.count, self.width, self.log = count, width, log
        self.own = np.random.default_rng(5)
        self.python = random.Random(5)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place in range(self.count):
            yield self.sample((place + self.epoch) % self.count)

    def sample(self, index: int) -> dict[str, Any]:
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps([self.epoch, index]) + "\n")
        x = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        return {"index": index, "x": x, "y": x.sum().cos(), "epoch": self.epoch,
                "draws": draws(self)}


class Lanes(Whole):
    """Lane k has `sizes[k]` samples."""

    def __init__(self, sizes: list[int], width: int, log: str = "") -> None:
        super().__init__(sum(sizes), width, log)
        self.sizes = sizes

    def lane(self, number: int, lanes: int) -> Iterator[dict[str, Any]]:
        assert lanes == len(self.sizes)
        for place in range(self.sizes[number]):
            yield self.sample(LANE * number + place)


class StatefulLanes(Lanes):
    """The same lanes, with iterators that have a state_dict."""

    def lane(self, number: int, lanes: int) -> Iterator[dict[str, Any]]:
        return LaneIterator(self, number)


class NodeLanes(Lanes):
    """The same lanes, of nodes of torchdata."""

    def lane(self, number: int, lanes: int) -> Loader:
        indices = IterableWrapper(range(LANE * number, LANE * number + self.sizes[number]))
        return Loader(Mapper(indices, self.sample))


class LaneIterator(Iterator):
    def __init__(self, dataset: Lanes, number: int) -> None:
        self._dataset, self._number, self._place = dataset, number, 0

    def __next__(self) -> dict[str, Any]:
        if self._place == self._dataset.sizes[self._number]:
            raise StopIteration
        self._place += 1
        return self._dataset.sample(LANE * self._number + self._place - 1)

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


class Behind(LaneIterator):
    """A source whose state is one sample behind."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place - 1}


class BehindLanes(Lanes):
    def lane(self, number: int, lanes: int) -> Iterator[dict[str, Any]]:
        return Behind(self, number)


class Measured(Whole):
    def __len__(self) -> int:
        return self.count


@dataclasses.dataclass(frozen=True)
class StreamTape(Tape):
    """`Tape` on a stream of `samples`, or on lanes of `sizes`."""

    kind: str = "whole"
    sizes: str = ""
    log: str = ""
    bad: int = 0
    """In epoch 1 the loss of the samples between 0 and this number is infinite."""

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        outcome = super().loss(model, batch)
        bad = (batch["epoch"] == 1) & (batch["index"] > 0) & (batch["index"] < self.bad)
        return dataclasses.replace(outcome, total=outcome.total * torch.inf) if bad.any() else (
            outcome)

    def dataset(self, split: str) -> IterableDataset | None:
        if split != "train":
            has_data = split == "validation" and self.validation
            return Whole(self.validation, self.width) if has_data else None
        kind = {"whole": Whole, "measured": Measured, "lanes": Lanes, "stateful": StatefulLanes,
                "nodes": NodeLanes, "behind": BehindLanes}
        content = [int(size) for size in self.sizes.split(",")] if self.sizes else self.samples
        return kind[self.kind](content, self.width, self.log)


def windows(tape: Path | str, ranks: int, lanes: int) -> list[list[tuple[int, int, tuple]]]:
    """The contents of each window as (epoch, id, draws), in the order of the lanes."""
    count = micro_batches_per_rank(lanes, ranks)
    tapes = read_tape(tape, ranks)
    assert len({len(lines) for lines in tapes}) == 1, "ranks ran different numbers of forwards"
    found = []
    for start in range(0, len(tapes[0]), count):
        lines = [line for lines in tapes for line in lines[start : start + count]]
        found.append([(epoch, index, tuple(drawn)) for line in lines for epoch, index, drawn in zip(
            line["epochs"], line["ids"], line["draws"], strict=True) if line["counts"]])
    return found
