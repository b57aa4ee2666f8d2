"""The bundled sample as other loaders prepare it: torchvision's transforms, per image or batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.transforms import v2

from examples import bare_loop


def unchanged(batch: Any) -> Any:
    """Collate what is already a batch."""
    return batch


def dataset(name: str) -> Dataset[Any]:
    """The training images of the sample, for a contestant of `benchmarks.loader`."""
    if name == "by hand":
        return bare_loop.load_data(0)[0]
    kind = {"v2 a batch": Batches, "v2 a sample": Samples, "PIL a sample": Pictures}[name]
    return kind()


class Samples(Dataset[Any]):
    """Single images as tensors, by torchvision.transforms.v2."""

    def __init__(self) -> None:
        images, labels, *_ = bare_loop.read_sample()
        self.pictures, self.labels = images, torch.from_numpy(labels.astype(np.int64))
        self.images = torch.from_numpy(images.copy()).unsqueeze(1)
        self.scale = [float(images.mean() / 255)], [float(images.std() / 255)]
        self.transform: Any = v2.Compose([
            v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*self.scale)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.transform(self.images[index]), self.labels[index]


class Batches(Samples):
    """Whole batches by the same transforms, which draw once for a whole batch."""

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        where = torch.tensor(indices)
        return self.transform(self.images[where]), self.labels[where]


class Pictures(Samples):
    """Single images as PIL images, by torchvision.transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = transforms.Compose([
            transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize(*self.scale)])

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.transform(Image.fromarray(self.pictures[index])), int(self.labels[index])
