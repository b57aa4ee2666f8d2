"""A task of sentences of different lengths in two parts, with several validation sets, and metrics
that are no means of samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset

from trainer import Outcome

LONGEST = 24


class Sentences(Dataset):
    """Sequences of 1 to 24 of 12 tokens, and whether token 0 is among them."""

    def __init__(self, count: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.lengths = draw.integers(1, LONGEST + 1, count)
        self.tokens = [torch.from_numpy(draw.integers(0, 12, n)) for n in self.lengths]
        self.labels = [int((tokens == 0).any()) for tokens in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # Some tokens are replaced, at random in each epoch.
        tokens = self.tokens[index]
        return torch.where(torch.rand(len(tokens)) < 0.1, tokens.roll(1), tokens), (
            self.labels[index])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(13, 16, padding_idx=12), nn.Linear(16, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)).sum(1)).squeeze(1)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Find out whether token 0 is in a sentence."""

    validation_sets: tuple[str, ...] = ("clean", "noisy")
    with_main: bool = True

    def model(self) -> nn.Module:
        return Bag()

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return ConcatDataset([Sentences(60, 0), Sentences(40, 1)])
        seeds = {"validation": 2, "validation:clean": 3, "validation:noisy": 4, "test": 5}
        if split == "validation" and not self.with_main:
            return None
        return Sentences(21, seeds[split])

    def weights(self, dataset: Any) -> list[float]:
        return [0.3, 0.7]

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        tokens, labels = zip(*samples, strict=True)
        padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=12)
        return padded, torch.tensor(labels)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        tokens, labels = batch
        logits = model(tokens)
        total = functional.binary_cross_entropy_with_logits(
            logits, labels.float(), reduction="sum")
        correct = ((logits > 0) == labels).sum()
        return Outcome(total, len(labels), {"accuracy": (correct, len(labels))})
