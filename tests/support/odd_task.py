"""A task with everything that could depend on the number of ranks: convolution, batch norms of each
kind, dropout, augmentation, a custom buffer, parameters of several dtypes and unused ones."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainer import Outcome

CLASSES = 4


class Images(Dataset):
    """Noisy 1x8x8 images with random shifts and noise at each read."""

    def __init__(self, count: int, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(count)
        self._labels = torch.arange(count) % CLASSES
        shapes = torch.randn(CLASSES, 1, 8, 8, generator=generator)
        self._images = shapes[self._labels] + torch.randn(count, 1, 8, 8, generator=generator)
        self._augment = augment

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index]
        if self._augment:
            image = image.roll(random.randint(-1, 1), dims=1) + 0.1 * torch.randn(image.shape)
        return image, int(self._labels[index])


class Net(nn.Module):
    """`width` decides whether gradients are reduced whole or in slices."""

    def __init__(self, width: int, odd: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.body = nn.Linear(6 * 16, width)
        self.second = nn.BatchNorm1d(width, momentum=None if odd else 0.1)
        self.head = nn.Linear(width, CLASSES, dtype=torch.float64 if odd else torch.float32)
        self.odd = odd
        if odd:
            self.between = nn.Conv2d(6, 6, 3, padding=1)
            self.never = nn.Parameter(torch.zeros(3))
            self.sometimes = nn.Parameter(torch.zeros(()))
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        if self.odd:  # a batch norm that is called twice
            x = functional.relu(self.norm(self.between(x)))
        x = functional.dropout(functional.max_pool2d(x, 2).flatten(1), 0.2, self.training)
        if self.odd and self.training:
            self.seen.mul_(0.9).add_(x.detach().sum() * 0.1)
            if len(x) and x[0, 0] > 0:
                x = x + self.sometimes
        x = functional.dropout(functional.relu(self.second(self.body(x))), 0.2, self.training)
        return self.head(x.to(self.head.weight.dtype))


@dataclasses.dataclass(frozen=True)
class Odd:
    """Classify small noisy images."""

    samples: int = 150
    validation: int = 26
    width: int = 16
    odd: bool = False

    def model(self) -> nn.Module:
        return Net(self.width, self.odd)

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return Images(self.samples, augment=True)
        return Images(self.validation, augment=False)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels = batch
        logits = model(images)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        if model.odd:  # type: ignore[union-attr]
            total = total.float()
        correct = (logits.argmax(1) == labels).sum()
        return Outcome(total, len(labels), {"accuracy": (correct, len(labels))})
