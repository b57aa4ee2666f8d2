"""Tasks of the speed benchmarks, with short steps and without metrics, which the loop by hand does
not compute either."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome
from trainer.tasks.images import Images


class CrossEntropy:
    """The loss of all these tasks."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        inputs, labels = batch
        total = functional.cross_entropy(model(inputs), labels, reduction="sum")
        return Outcome(total, len(labels))


@dataclasses.dataclass(frozen=True)
class TinyMlp(CrossEntropy):
    """Three classes in the plane by a network of 2-128-128-3."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                             nn.Linear(128, 3))

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return None
        points = torch.randn(30_000, 2, generator=torch.Generator().manual_seed(0))
        angle = torch.atan2(points[:, 1], points[:, 0])
        return Rows(points, (angle + 2 * points.norm(dim=1)).long() % 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallCnn(CrossEntropy, Images):
    """The default task."""


@dataclasses.dataclass(frozen=True)
class SmallResNet(CrossEntropy):
    """torchvision's ResNet-18 on random images of 32 x 32, ten classes."""

    def model(self) -> nn.Module:
        from torchvision.models import resnet18

        return resnet18(num_classes=10)

    def dataset(self, split: str) -> Dataset | None:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        return Rows(torch.randn(5000, 3, 32, 32, generator=generator),
                    torch.randint(10, (5000,), generator=generator))


class Rows(TensorDataset):
    """Tensors in memory, read a batch at a time."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)
