"""The bundled sample as others would load it: transforms of torchvision, image by image or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


def unchanged(batch: Any) -> Any:
    """Collates what is a batch already."""
    return batch


def dataset(name: str) -> Dataset[Any]:
    """The training images of the sample, for a contestant of `benchmarks.loader`."""
    from examples import bare_loop

    if name in ("by hand", "stateful"):
        return bare_loop.load_data(0)[0]
    images, labels, *_ = bare_loop.read_sample()
    kind = {"v2 a batch": Batches, "v2 a sample": Tensors, "PIL a sample": Pictures}[name]
    return kind(images, labels)


class Tensors(Dataset[Any]):
    """Single images as tensors, by torchvision.transforms.v2."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = torch.from_numpy(images.copy()).unsqueeze(1)
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.transform = _v2(float(images.mean() / 255), float(images.std() / 255))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


class Batches(Tensors):
    """Whole batches by the same transforms, which draw once for all of a batch."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        where = torch.tensor(indices)
        return self.transform(self.images[where]), self.labels[where]


class Pictures(Dataset[Any]):
    """Single images as PIL images, by torchvision.transforms."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        from torchvision import transforms

        self.images, self.labels = images, labels.astype(np.int64)
        self.transform = transforms.Compose([
            transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize([float(images.mean() / 255)], [float(images.std() / 255)]),
        ])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def _v2(mean: float, std: float) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
                       v2.Normalize([mean], [std])])
