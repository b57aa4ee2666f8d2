"""The task of the chaos runs: tiny, with every kind of state that a restart could lose."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from trainer import Outcome

PIXELS = 8
CLASSES = 4


class Patches(Dataset):
    """Noisy 1x8x8 images of 4 classes; `augment`: moved, mirrored and disturbed at each access by
    draws from every kind of generator."""

    def __init__(self, count: int, *, augment: bool) -> None:
        generator = torch.Generator().manual_seed(count)
        self._labels = torch.arange(count) % CLASSES
        shapes = torch.randn(CLASSES, 1, PIXELS, PIXELS, generator=generator)
        noise = torch.randn(count, 1, PIXELS, PIXELS, generator=generator)
        self._images = shapes[self._labels] + noise
        self._augment = augment
        self._numpy = np.random.default_rng(1)
        self._torch = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index]
        if self._augment:
            image = image.roll(random.randint(-1, 1), dims=1)
            image = image.roll(int(self._numpy.integers(-1, 2)), dims=2)
            if np.random.rand() < 0.5:
                image = image.flip(2)
            scale = 1 + 0.1 * torch.randn((), generator=self._torch)
            image = image * scale + 0.1 * torch.randn(image.shape)
        return image, int(self._labels[index])


@dataclasses.dataclass(frozen=True)
class Chaos:
    """Classify small noisy images, with a convolution, batch norm and dropout."""

    samples: int = 150
    validation: int = 40
    pause_s: float = 0.0  # in each call of `loss`

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(6 * (PIXELS // 2) ** 2, 16), nn.ReLU(),
            nn.Dropout(0.2), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def dataset(self, split: str) -> Dataset | None:
        if split == "train":
            return Patches(self.samples, augment=True)
        return Patches(self.validation, augment=False)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        images, labels = batch
        if self.pause_s:
            time.sleep(self.pause_s)
        logits = model(images)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        return Outcome(total, len(labels), {"accuracy": (correct, len(labels))})
