"""Tasks for the speed benchmarks: models whose step is as short as a step gets."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome
from trainer.tasks.images import Images


@dataclasses.dataclass(frozen=True)
class TinyMlp:
    """Three classes in the plane by a network of 2-128-128-3."""

    samples: int = 30000
    width: int = 128

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                             nn.Linear(width, 3))

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(self.samples, 2, generator=generator)
        angle = torch.atan2(points[:, 1], points[:, 0])
        return Rows(points, (angle + 2 * points.norm(dim=1)).long() % 3)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        points, labels = batch
        return Outcome(functional.cross_entropy(model(points), labels, reduction="sum"),
                       len(labels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallCnn(Images):
    """The default task without its accuracy, which the loop by hand doesn't count either."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        images, labels = batch
        return Outcome(functional.cross_entropy(model(images), labels, reduction="sum"),
                       len(labels))


@dataclasses.dataclass(frozen=True)
class SmallResNet:
    """torchvision's ResNet-18 on random images of 32 x 32, ten classes."""

    samples: int = 5000

    def model(self) -> nn.Module:
        from torchvision.models import resnet18

        return resnet18(num_classes=10)

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        return Rows(torch.randn(self.samples, 3, 32, 32, generator=generator),
                    torch.randint(10, (self.samples,), generator=generator))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        images, labels = batch
        return Outcome(functional.cross_entropy(model(images), labels, reduction="sum"),
                       len(labels))


class Rows(TensorDataset):
    """Tensors in memory, read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)
