"""Built-in task: classify photographs (one folder per class, or CIFAR-10) with a torchvision
classifier, from scratch or from published weights."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from trainer.config.fields import Section, setting
from trainer.data.tar_shards import read_rgb
from trainer.errors import ConfigError
from trainer.task import Outcome
from trainer.tasks import losses
from trainer.tasks.image_models import classifier, find_pretrained, pretrained
from trainer.tasks.images import CLASS_FIGURES, ImageSet, divide, mean_and_std
from trainer.telemetry import drawing
from trainer.telemetry.classification import Figure

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation per channel, 0 to 1, as used for torchvision's weights."""

CIFAR_10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
               "test": ("test_batch.bin",)}
_RECORD, _SIDE, _PADDING = 3073, 32, 4
_FOLDERS = {"train": ("train",), "validation": ("val", "validation", "valid"), "test": ("test",)}


def _read(path: str) -> Any:
    """Read an image as RGB. An OSError names the path, which PIL's own errors may not."""
    try:
        return read_rgb(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise OSError(f"{path}: {error}") from error


def _normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return images.float().sub_(mean).div_(std)


@dataclass(frozen=True, kw_only=True)
class Photos(Section, prefix="task."):
    """Classify photographs."""

    root: str | None = setting(None, "ignored")
    """Required: folder with train/CLASS/FILE and optionally val/ and test/ in the same form, or
    with the binary files of CIFAR-10 (data_batch_1.bin …)."""
    data: Literal["folder", "cifar-10"] = "folder"
    """Format of the data in root."""
    architecture: str = field(
        default="resnet18", metadata={"flag": "model"})  # `model` itself is the method
    """A classifier of torchvision.models, or your own module:Class (called with the number of
    classes)."""
    weights: str | None = None
    """Start from these weights of torchvision, such as IMAGENET1K_V1 or DEFAULT. The last layer is
    newly initialised if the number of classes differs. Also sets image sizes and normalisation."""
    crop: int | None = setting(None, "must_match", ">= 1")
    """Width and height of the model's input in pixels; by default that of the weights, or 224."""
    resize: int | None = setting(None, "must_match", ">= 1")
    """Shorter side in pixels before the centre crop in validation; by default that of the weights,
    or 8/7 of the crop."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weigh classes in the loss inversely to their number of training images."""
    label_smoothing: float = setting(0.0, "must_match", ">= 0 and < 1")
    """Share of the target that is spread over all classes, in training only."""
    validation_fraction: float = setting(0.1, "must_match", ">= 0 and < 1")
    """Share of the training images held out for validation, if there is no folder for it."""
    seed: int | None = None
    """Determines which images are held out; by default the run's seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("crop", "resize"):
            self.check(self.data == "folder" or getattr(self, name) is None, name,
                       "images of CIFAR-10 keep their size; remove it.")

    @property
    def class_names(self) -> tuple[str, ...]:
        if self.data == "cifar-10":
            return CIFAR_10
        return tuple(sorted(p.name for p in self._folder("train").iterdir() if p.is_dir()))

    @property
    def source(self) -> str:
        return str(self._root)

    def model(self) -> nn.Module:
        """Images Nx3xHxW → logits NxC."""
        if self.weights is not None:
            return pretrained(self.architecture, self.weights, len(self.class_names))
        side = _SIDE if self.data == "cifar-10" else self._sizes()[0]
        return classifier(self.architecture, len(self.class_names), size=side)

    def dataset(self, split: str) -> Dataset | None:
        """The images of a split; those for training with random resized crops and flips."""
        if self.data == "cifar-10":
            images, labels = read_cifar(self._root, "test" if split == "test" else "train")
            mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) * 255 for v in self._statistics())
            whole: Any = ImageSet(
                images, labels, functools.partial(_normalise, mean=mean, std=std),
                flip=split == "train", padding=_PADDING if split == "train" else 0)
            return whole if split == "test" else self._part(whole, split)
        own = self._find(split)
        if own is None and (split == "test" or not self.validation_fraction):
            return None
        whole = self._images(own or self._folder("train"), train=split == "train")
        if whole.classes != list(self.class_names):
            raise ConfigError(f"task.root {own}: the folders {', '.join(whole.classes)} differ "
                              f"from the training classes: {', '.join(self.class_names)}.")
        return whole if own and (split != "train" or self._find("validation")) else (
            self._part(whole, split))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        images, labels = batch
        weight = losses.balanced(count_images(self)) if self.class_weights == "balanced" else None
        return losses.classification(
            model(images).float(), labels, training=model.training, weight=weight,
            label_smoothing=self.label_smoothing)

    def figures(self) -> dict[str, Figure]:
        return CLASS_FIGURES

    def first_loss(self) -> float:
        return 0.0 if self.weights is not None else math.log(len(self.class_names))

    def picture(self, model: nn.Module) -> np.ndarray:
        images, labels = _shown(self)
        logits = model(images.to(next(model.parameters()).device))
        return drawing.predictions(images, logits, labels, self.class_names)

    def fingerprint(self) -> str:
        """Depends on the names and sizes of the files, the labels, and the validation split."""
        digest = xxhash.xxh3_64()
        root = self._root
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            digest.update(os.fsencode(f"{path.relative_to(root)} {path.stat().st_size}\n"))
        return f"{digest.hexdigest()}, validation {self.validation_fraction} seed {self.seed or 0}"

    @property
    def _root(self) -> Path:
        if self.root is None:
            raise ConfigError("--task.root: set the folder of the images; see docs/tasks.md.")
        return Path(self.root).expanduser()

    def _sizes(self) -> tuple[int, int]:
        """Pixels of the crop, and of the shorter side before the centre crop in validation."""
        own = _preset(self.architecture, self.weights)
        crop = self.crop or (own.crop_size[0] if own else 224)
        resize = self.resize or (own.resize_size[0] if own and not self.crop else crop * 8 // 7)
        self.check(resize >= crop, "resize", f"use the crop, {crop}, or more.")
        return crop, resize

    def _statistics(self) -> tuple[Sequence[float], Sequence[float]]:
        own = _preset(self.architecture, self.weights)
        if own is not None:
            return own.mean, own.std
        return _mean_and_std(self._root) if self.data == "cifar-10" else IMAGENET

    def _images(self, folder: Path, *, train: bool) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        crop, resize = self._sizes()
        own = _preset(self.architecture, self.weights)
        options = {} if own is None else {"interpolation": own.interpolation}
        # These draw from torch's generator, which the loader keys by (seed, epoch, sample).
        crops = ([v2.RandomResizedCrop(crop, antialias=True, **options), v2.RandomHorizontalFlip()]
                 if train else [v2.Resize(resize, antialias=True, **options), v2.CenterCrop(crop)])
        mean, std = self._statistics()
        try:
            return ImageFolder(folder, v2.Compose([
                *crops, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(list(mean), list(std))]), loader=_read)
        except OSError as error:
            raise ConfigError(f"task.root {folder}: {error}") from error

    def _part(self, whole: Any, split: str) -> Dataset | None:
        """The part for training or for validation; None if nothing is held out."""
        train, held_out = divide(len(whole), self.seed or 0, self.validation_fraction)
        if split == "validation" and not len(held_out):
            return None
        return Subset(whole, (train if split == "train" else held_out).tolist())

    def _find(self, split: str) -> Path | None:
        places = (self._root / name for name in _FOLDERS[split])
        return next((place for place in places if place.is_dir()), None)

    def _folder(self, split: str) -> Path:
        found = self._find(split)
        if found is None:
            raise ConfigError(f"task.root {self.root}: there is no folder {split} in it; store the "
                              "images as ROOT/train/CLASS/FILE.")
        return found


@functools.cache
def read_cifar(root: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images Nx3x32x32 and labels N, uint8, of CIFAR-10's binary files. A record is the label, then
    the red, green and blue pixels (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    parts = []
    for name in CIFAR_FILES[split]:
        places = (root / name, root / "cifar-10-batches-bin" / name)
        path = next((p for p in places if p.is_file()), None)
        if path is None:
            raise ConfigError(f"task.root {root}: there is no {name}; extract the binary version "
                              "of CIFAR-10 there (cifar-10-binary.tar.gz).")
        data = np.fromfile(path, dtype=np.uint8)
        if not len(data) or len(data) % _RECORD:
            raise ConfigError(f"{path}: {len(data)} bytes, which is not a multiple of the record "
                              f"size {_RECORD}; download the file again.")
        parts.append(data.reshape(-1, _RECORD))
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE), records[:, 0]


@functools.cache
def _mean_and_std(root: Path) -> tuple[list[float], list[float]]:
    """Of each channel of CIFAR-10's training images, 0 to 1."""
    images, _ = read_cifar(root, "train")
    mean, std = mean_and_std(images.transpose(1, 0, 2, 3).reshape(3, -1))
    return (mean / 255).tolist(), (std / 255).tolist()


@functools.lru_cache(maxsize=1)
def _shown(task: Photos) -> tuple[Tensor, list[int]]:
    """12 evenly spaced validation images and their labels."""
    data: Any = task.dataset("validation") or task.dataset("test") or task.dataset("train")
    samples = [data[i] for i in range(0, len(data), -(-len(data) // 12))]
    return torch.stack([image for image, _ in samples]), [int(label) for _, label in samples]


@functools.cache
def count_images(task: Photos) -> tuple[int, ...]:
    """Number of training images per class."""
    part: Any = task.dataset("train")
    whole = getattr(part, "dataset", part)  # of a Subset
    labels = np.asarray(whole.targets)[getattr(part, "indices", slice(None))]
    return tuple(np.bincount(labels, minlength=len(task.class_names)).tolist())


@functools.cache
def _preset(architecture: str, weights: str | None) -> Any:
    """torchvision's preprocessing of the weights; None without weights."""
    return None if weights is None else find_pretrained(architecture, weights).transforms()
