"""Built-in task: language modelling on the bytes of a file with a small GPT."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from torchdata.nodes import BaseNode

from trainer import rng
from trainer.config.fields import Section, setting
from trainer.distributed.partition import block
from trainer.errors import ConfigError
from trainer.task import Outcome
from trainer.tasks import losses
from trainer.tasks.gpt import GPT
from trainer.telemetry.classification import Figure

BYTES = 256
NOT_COUNTED = -100
"""Ignored target, in the padding of the last piece."""


class Pieces(Dataset):
    """A memory-mapped file in pieces (inputs, targets), int64 of length `context`; the target of a
    byte is the next byte. The last piece is padded with input 0 and target `NOT_COUNTED`."""

    def __init__(self, data: np.ndarray, context: int) -> None:
        self.data, self.context = data, context

    def __len__(self) -> int:
        return -(-(len(self.data) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A complete batch of inputs and targets, NxT each."""
        return self._batch([(i * self.context, (i + 1) * self.context) for i in indices],
                           self.context)

    def _batch(self, bounds: Sequence[tuple[int, int]], width: int) -> tuple[Tensor, Tensor]:
        """The bytes from `begin` to `end` of each row, padded to the width."""
        inputs = np.zeros((len(bounds), width), dtype=np.int64)
        targets = np.full((len(bounds), width), NOT_COUNTED, dtype=np.int64)
        for row, (begin, end) in enumerate(bounds):
            piece = self.data[begin : end + 1]
            inputs[row, : len(piece) - 1] = piece[:-1]
            targets[row, : len(piece) - 1] = piece[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class UnequalPieces(Pieces):
    """Pieces of keyed lengths from `shortest` to `context`, padded to the longest in the batch."""

    def __init__(self, data: np.ndarray, context: int, shortest: int) -> None:
        super().__init__(data, context)
        last = len(data) - 1
        lengths = shortest + (rng.mix_array(context, np.arange(-(-last // shortest)))
                              % np.uint64(context - shortest + 1)).astype(np.int64)
        ends = np.cumsum(lengths)
        self._ends = np.minimum(ends[: np.searchsorted(ends, last) + 1], last)
        self.lengths = np.diff(self._ends, prepend=0)
        """Length of each piece, for `--data.sampler like-length`."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        ends, lengths = self._ends[list(indices)], self.lengths[list(indices)]
        bounds = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
        return self._batch([*bounds], int(lengths.max()))


class PieceStream(IterableDataset):
    """The pieces in the order of the text; each lane reads a contiguous part of it."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> PieceNode:
        return self.lane(0, 1)

    def lane(self, number: int, lanes: int) -> PieceNode:
        return PieceNode(self.pieces, block(len(self.pieces), number, lanes))


class PieceNode(BaseNode[tuple[Tensor, Tensor]]):
    """Some pieces in a row; the state is how many of them have been read."""

    def __init__(self, pieces: Pieces, numbers: range) -> None:
        super().__init__()
        self._pieces, self._numbers, self._done = pieces, numbers, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._done = 0 if initial_state is None else initial_state["done"]

    def next(self) -> tuple[Tensor, Tensor]:
        if self._done == len(self._numbers):
            raise StopIteration
        self._done += 1
        return self._pieces[self._numbers[self._done - 1]]

    def get_state(self) -> dict[str, Any]:
        return {"done": self._done}


@dataclass(frozen=True, kw_only=True)
class Text(Section, prefix="task."):
    """Predict the next byte of a text."""

    file: str | None = setting(None, "ignored")
    """Any file; by default pydoc_data/topics.py of this Python, 0.7 MB of its documentation."""
    stream: bool = False
    """Read the text in order, as a stream in lanes, instead of in shuffled pieces."""
    context: int = setting(64, "must_match", ">= 1")
    """Context length in bytes."""
    shortest: int | None = setting(None, "must_match", ">= 1")
    """Cut pieces of different lengths, from this one to the context; by default all are as long."""
    layers: int = setting(2, "must_match", ">= 1")
    """Number of transformer blocks."""
    heads: int = setting(4, "must_match", ">= 1")
    """Number of attention heads."""
    width: int = setting(64, "must_match", ">= 1")
    """Embedding size."""
    dropout: float = setting(0.0, "must_match", ">= 0 and < 1")
    """Dropout probability, in training only."""
    validation_fraction: float = setting(0.1, "must_match", ">= 0 and < 1")
    """Share of the text, at its end, that is held out for validation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.width % self.heads == 0, "width",
                   f"use a multiple of --task.heads {self.heads}.")
        self.check(self.shortest is None or self.shortest <= self.context, "shortest",
                   f"use at most --task.context {self.context}.")
        self.check(self.shortest is None or not self.stream, "shortest",
                   "the pieces of a stream have one length; remove --task.stream.")

    @property
    def source(self) -> str:
        standard = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
        return str(standard if self.file is None else Path(self.file).expanduser())

    def model(self) -> nn.Module:
        """Bytes NxT → logits NxTx256."""
        return GPT(tokens=BYTES, context=self.context, layers=self.layers, heads=self.heads,
                   width=self.width, dropout=self.dropout)

    def dataset(self, split: str) -> Dataset | None:
        """The start of the text for training, its end for validation; None for "test"."""
        text = self._text()
        held_out = round(len(text) * self.validation_fraction)
        if split == "test" or (split == "validation" and not held_out):
            return None
        part = text[len(text) - held_out :] if split == "validation" else (
            text[: len(text) - held_out])
        if len(part) < 2:
            raise ConfigError(f"task.file {self.source}: {len(text)} bytes are too few for "
                              "training and validation; use a longer text.")
        pieces = (Pieces(part, self.context) if self.shortest is None else
                  UnequalPieces(part, self.context, self.shortest))
        return PieceStream(pieces) if self.stream and split == "train" else pieces

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        inputs, targets = batch
        logits = model(inputs).float()
        loss = losses.named("cross-entropy", ignore_index=NOT_COUNTED)
        return Outcome(*loss(logits.flatten(0, 1), targets.flatten()))

    def figures(self) -> dict[str, Figure]:
        return {"perplexity": lambda means, table: math.exp(min(means["loss"], 700.0)),
                "bits_per_byte": lambda means, table: means["loss"] / math.log(2)}

    def first_loss(self) -> float:
        return math.log(BYTES)

    def fingerprint(self) -> str:
        """Depends on the text and on the validation split."""
        text = self._text()
        digest: Any = xxhash.xxh3_64(text.data).hexdigest()
        return f"{len(text)} bytes {digest}, validation {self.validation_fraction}"

    def _text(self) -> np.ndarray:
        try:
            return np.memmap(self.source, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ConfigError(f"task.file {self.source}: {error}; set a text by "
                              "--task.file PATH.") from None


@dataclass(frozen=True, kw_only=True)
class MuonText(Text):
    """Predict the next byte of a text; Muon trains the matrices of the blocks, AdamW the rest."""

    muon_lr: float = setting(3e-3, "must_match", "> 0 and < inf")
    """Peak rate of Muon, whose updates are scaled to the size of AdamW's."""
    adamw_lr: float = setting(3e-3, "must_match", "> 0 and < inf")
    """Peak rate of AdamW."""
    weight_decay: float = setting(0.1, "must_match", ">= 0 and < inf")
    """Weight decay of all parameters but biases and norms."""

    def optimizers(self, model: GPT) -> dict[str, torch.optim.Optimizer]:
        hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
        groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": self.weight_decay},
                  {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
        return {"muon": torch.optim.Muon(hidden, lr=self.muon_lr, weight_decay=self.weight_decay,
                                         adjust_lr_fn="match_rms_adamw"),
                "adamw": torch.optim.AdamW(groups, lr=self.adamw_lr, betas=(0.9, 0.95), fused=True)}
