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

    def __init__(self, count: int, seed: int, noise: float = 0.0) -> None:
        self.noise, draw = noise, np.random.default_rng(seed)
        self.lengths = draw.integers(1, LONGEST + 1, count)
        self.tokens = [torch.from_numpy(draw.integers(0, 12, n)) for n in self.lengths]
        self.labels = [int((tokens == 0).any()) for tokens in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        tokens = self.tokens[index]
        return torch.where(torch.rand(len(tokens)) < self.noise, tokens.roll(1), tokens), (
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
    objects: bool = False
    """Whether it has metrics of torchmetrics."""

    def model(self) -> nn.Module:
        return Bag()

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return ConcatDataset([Sentences(60, 0, 0.1), Sentences(40, 1, 0.1)])
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
        if model.training:
            return Outcome(total, len(labels))
        correct = ((logits > 0) == labels).sum()
        return Outcome(total, len(labels), {"accuracy": (correct, len(labels))},
                       predictions=predictions(logits, batch))

    def metrics(self) -> dict[str, Any]:
        if not self.objects:
            return {}
        from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryF1Score
        from torchmetrics.text import BLEUScore

        return {"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision(), "f1": BinaryF1Score(),
                "bleu": BLEUScore(n_gram=2)}


def predictions(logits: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The arguments of each metric. As a text, the model repeats a sentence, backwards if it finds
    no token 0 in it."""
    tokens, labels = batch
    rows = [row[row < 12].tolist() for row in tokens]
    texts = [" ".join(map(str, row if logit > 0 else row[::-1]))
             for row, logit in zip(rows, logits, strict=True)]
    return {**dict.fromkeys(("auroc", "ap", "f1"), (logits.sigmoid(), labels)),
            "bleu": (texts, [[" ".join(map(str, row))] for row in rows])}
