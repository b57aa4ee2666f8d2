"""A task for runs that are disturbed from outside: its steps take their time, its metrics tell
which samples each step has consumed."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch
from runs import steps
from tape_task import Indexed, Net
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer import Outcome

HALF = 24  # bits that a float32 holds exactly


@dataclasses.dataclass(frozen=True)
class Paced:
    """Regression on 48 numbered samples."""

    pace_s: float = 0.02
    """How long each micro-batch takes."""

    def model(self) -> nn.Module:
        return Net(3, "batch", 0.2)

    def dataset(self, split: str) -> Dataset | None:
        return {"train": Indexed(2 * HALF, 3), "validation": Indexed(8, 3)}.get(split)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Outcome:
        if model.training:
            time.sleep(self.pace_s)
        error = (model(batch["x"]) - batch["y"]).square()
        index = batch["index"]
        low, high = (torch.where((index >= h * HALF) & (index < (h + 1) * HALF),
                                 2.0 ** (index - h * HALF).float(), 0.0).sum() for h in (0, 1))
        return Outcome(error.sum(), len(error),
                       {"low": (low, len(error)), "high": (high, len(error))})


def consumed(run: Path) -> list[frozenset[int]]:
    """The samples of each step in metrics.jsonl, which must tell each step once and in order."""
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    found = []
    for line in lines:
        masks = [round(line[half] * line["samples"]) for half in ("low", "high")]
        mask = masks[0] | masks[1] << HALF
        found.append(frozenset(i for i in range(2 * HALF) if mask >> i & 1))
    return found
