"""The task of `tape_task` with samples that raise when they are read or collated."""

from __future__ import annotations

import builtins
import dataclasses
from typing import Any

from tape_task import Indexed, Tape
from torch.utils.data import Dataset

from trainer.data import batch as batches


class Bad(Indexed):
    """`Indexed` with some samples that raise when they are read."""

    def __init__(self, count: int, width: int, bad: set[int], error: str = "ValueError") -> None:
        super().__init__(count, width)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise getattr(builtins, self.error)(f"no picture in {index}")  # the user's line
        return super().__getitem__(index)


class BadAtOnce(Bad):
    """The same, read in batches by `__getitems__`."""

    def __getitems__(self, indices: Any) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def numbers(text: str) -> set[int]:
    return {int(number) for number in text.split(",") if number}


@dataclasses.dataclass(frozen=True)
class BadTape(Tape):
    """`Tape` on these samples; the bad ones are listed as 3,5."""

    bad: str = ""
    uncollatable: str = ""
    bad_validation: str = ""
    batched: bool = False
    error: str = "ValueError"

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return (Bad(self.validation, self.width, numbers(self.bad_validation))
                    if self.validation else None)
        return (BadAtOnce if self.batched else Bad)(self.samples, self.width, numbers(self.bad),
                                                    self.error)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        wrong = {sample["index"] for sample in samples} & numbers(self.uncollatable)
        if wrong:
            raise ValueError(f"no shape for {wrong}")
        return batches.collate(samples)
