"""Built-in task: classify 28x28 grey images of clothing (Fashion-MNIST)."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainer import rng
from trainer.config.fields import Section, setting
from trainer.data import augment
from trainer.errors import ConfigError
from trainer.storage import layout, tensorfile
from trainer.task import Outcome
from trainer.tasks import fashion_mnist, losses
from trainer.tasks.image_models import SmallCNN, classifier
from trainer.telemetry import drawing
from trainer.telemetry.classification import Figure, macro

Data = Literal["sample", "fashion-mnist"]
Norm = Literal["batch", "group", "none"]
Augment = Literal["flip", "flip+crop", "none"]

CLASS_FIGURES: dict[str, Figure] = {name: macro(name) for name in ("precision", "recall", "f1")}
SHOWN = 24
"""Number of images in a picture."""
CROP_PADDING = 2
"""Pixels. The usual 4 of 32x32 photographs would cut off sleeves and soles."""


class ImageSet(Dataset):
    """Images NxCxHxW uint8 in memory, read in batches by `__getitems__` (32 of 28x28 in about
    45 us), and flipped and shifted by up to `padding` pixels if the indices have `keys`."""

    def __init__(self, images: np.ndarray, labels: np.ndarray,
                 normalise: Callable[[Tensor], Tensor], *, flip: bool, padding: int = 0) -> None:
        self.images = torch.from_numpy(np.require(images, requirements="W"))
        self.targets = torch.from_numpy(labels.astype(np.int64))
        self._normalise, self._flip, self._padding = normalise, flip, padding

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images float32 and labels N int64: a complete batch, which isn't collated."""
        # numpy, as in `augment`: on small tensors the dispatch of torch operations costs more.
        where = np.array(indices, dtype=np.int64)
        images = torch.from_numpy(self.images.numpy()[where])
        keys = getattr(indices, "keys", None)
        if keys is not None and self._flip:
            images = augment.flip(images, keys)
        if keys is not None and self._padding:
            images = augment.crop(images, keys, self._padding)
        return self._normalise(images), torch.from_numpy(self.targets.numpy()[where])


def _normalise(images: Tensor, mean: float, scale: float) -> Tensor:
    # Separate operations, each rounded once: bits don't depend on the position in the batch.
    pixels = images.numpy().astype(np.float32)
    pixels -= np.float32(mean)
    pixels *= np.float32(scale)
    return torch.from_numpy(pixels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Section, prefix="task."):
    """Classify images of clothing."""

    data: Data = "sample"
    """sample: 12,000 + 2,000 images of Fashion-MNIST, included in this package;
    fashion-mnist: all 60,000 + 10,000."""
    root: str | None = setting(None, "ignored")
    """First folder searched for the full data set, and target of its download."""
    architecture: str = dataclasses.field(
        default="cnn", metadata={"flag": "model"})  # `model` itself is the method
    """cnn (two convolutions, 422,000 weights), a classifier of torchvision.models such as resnet18,
    or your own module:Class (called with the number of classes)."""
    norm: Norm = "batch"
    """Normalisation in the cnn. group: the result doesn't depend on the micro-batch size."""
    augment: Augment = "flip"
    """Random augmentation of the training images. flip+crop needs longer training to help."""
    label_smoothing: float = setting(0.0, "must_match", ">= 0 and < 1")
    """Share of the target that is spread over all classes, in training only."""
    dropout: float = setting(0.0, "must_match", ">= 0 and < 1")
    """Dropout probability of the cnn's hidden units, in training only."""
    teacher: str | None = setting(None, "ignored")
    """Distil this model: a run folder, a checkpoint folder, or a model.safetensors."""
    teacher_architecture: str = dataclasses.field(
        default="cnn", metadata={"flag": "teacher_model"})
    """Architecture of the teacher, as for model."""
    teacher_share: float = setting(0.5, "must_match", ">= 0 and <= 1")
    """Weight of the distillation loss; the loss on labels has the rest."""
    temperature: float = setting(4.0, "must_match", "> 0 and < inf")
    """Divisor of the logits in distillation; raises the weight of small probabilities."""
    validation_fraction: float = setting(0.2, "must_match", ">= 0 and < 1")
    """Share of the training file that is held out for validation."""
    seed: int | None = None
    """Determines which images are held out; by default the run's seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.architecture == "cnn"
        self.check(own or self.norm == "batch", "norm", "it is a setting of the cnn; remove it.")
        self.check(own or not self.dropout, "dropout", "it is a setting of the cnn; remove it.")
        self.check(self.data != "sample" or self.root is None, "root",
                   "the sample is part of this package; add --task.data fashion-mnist.")
        for name in ("teacher_architecture", "teacher_share", "temperature"):
            self.check(self.teacher is not None or getattr(self, name) == getattr(Images, name),
                       name, "only a --task.teacher uses it; remove it.")

    @property
    def class_names(self) -> tuple[str, ...]:
        return fashion_mnist.CLASS_NAMES

    @property
    def source(self) -> str:
        """The folder of the data, or a description of it."""
        return self._arrays().source

    def model(self) -> nn.Module:
        """Images Nx1x28x28 → logits Nx10."""
        if self.architecture == "cnn":
            return SmallCNN(self.norm, self.dropout)
        return classifier(self.architecture)

    def dataset(self, split: str) -> ImageSet | None:
        """The images of a split; None for "validation" if no images are held out."""
        arrays = self._arrays()
        images, labels = self._splits(arrays)[split]
        if not len(labels):
            return None
        mean, std = _statistics(arrays, self.seed or 0, self.validation_fraction)
        augmentation = self.augment if split == "train" else "none"
        normalise = functools.partial(_normalise, mean=mean, scale=1 / std)
        return ImageSet(images[:, None], labels, normalise, flip=augmentation != "none",
                        padding=CROP_PADDING if augmentation == "flip+crop" else 0)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        """Cross-entropy and accuracy; with a teacher, in training, a weighted sum with the KL
        divergence from its predictions."""
        images, labels = batch
        logits = model(images).float()
        outcome = losses.classification(logits, labels, training=model.training,
                                        label_smoothing=self.label_smoothing)
        if self.teacher is None or not model.training:
            return outcome
        teacher = _load_teacher(self.teacher, self.teacher_architecture, images.device)
        with torch.no_grad():
            wanted = teacher(images).float()
        divergence, _ = losses.named("kl", temperature=self.temperature)(logits, wanted)
        total: Any = outcome.total
        total = (1 - self.teacher_share) * total + self.teacher_share * divergence
        return dataclasses.replace(outcome, total=total)

    def figures(self) -> dict[str, Figure]:
        return CLASS_FIGURES

    def first_loss(self) -> float:
        return 0.0 if self.teacher is not None else math.log(len(self.class_names))

    def picture(self, model: nn.Module) -> np.ndarray:
        shown = self.dataset("validation") or self.dataset("test")
        assert shown is not None
        images, labels = shown.__getitems__(range(min(SHOWN, len(shown))))
        logits = model(images.to(next(model.parameters()).device))
        return drawing.predictions(images, logits, labels, self.class_names)

    def fingerprint(self) -> str:
        """Depends on images, labels, split and teacher, but not on the folder."""
        arrays = self._arrays()
        content = xxhash.xxh3_64()  # hashes everything: 11 MB take 2 ms
        for array in (arrays.train_images, arrays.train_labels,
                      arrays.test_images, arrays.test_labels):
            content.update(array.data)
        if self.teacher is not None:
            content.update(_weights_file(self.teacher).read_bytes())
        return (f"{len(arrays.train_labels)}+{len(arrays.test_labels)} images {content.hexdigest()}"
                f", validation {self.validation_fraction} seed {self.seed or 0}")

    def preload(self) -> None:
        """Read the data with numpy alone, in a launcher, for the ranks that it forks."""
        _statistics(self._arrays(), self.seed or 0, self.validation_fraction)

    def preview(self, number: int) -> Tensor:
        """The first training images without augmentation, uint8 Nx1x28x28, N at most `number`."""
        images, _ = self._splits(self._arrays())["train"]
        return torch.from_numpy(images[:number]).unsqueeze(1)

    def _arrays(self) -> fashion_mnist.Arrays:
        if self.data == "sample":
            return fashion_mnist.read_sample()
        return fashion_mnist.read_folder(fashion_mnist.find_dataset(self.root, os.environ))

    def _splits(self, arrays: fashion_mnist.Arrays) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return _splits(arrays, self.seed or 0, self.validation_fraction)


def _weights_file(teacher: str) -> Path:
    """The weights file in a run or checkpoint folder, or `teacher` itself if it is a file."""
    path = Path(teacher).expanduser()
    path = path / layout.PRODUCT if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"--task.teacher {teacher}: there is no {path}; give the folder of a "
                          "finished run or of a checkpoint, or its model.safetensors.")
    return path


@functools.cache  # read once per process; the teacher isn't trained
def _load_teacher(teacher: str, architecture: str, device: torch.device) -> nn.Module:
    path = _weights_file(teacher)
    with rng.preserved(), torch.inference_mode(False):
        net = Images(architecture=architecture).model()
        try:
            net.load_state_dict(tensorfile.load_tensors(path))
        except (RuntimeError, SafetensorError) as error:
            raise ConfigError(f"--task.teacher {teacher}: {path} doesn't fit --task.teacher-model "
                              f"{architecture}: {error}") from None
    return net.to(device).eval().requires_grad_(False)


def divide(number: int, seed: int, held_out_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Sorted indices of `number` images: those to train on, and those held out."""
    keys = rng.mix_array(rng.mix(rng.DATA, seed), np.arange(number))
    order = np.argsort(keys, kind="stable")
    held_out = round(number * held_out_fraction)
    if held_out == number:
        raise ConfigError(f"--task.validation-fraction {held_out_fraction}: none of {number} "
                          "images is left for training; use a smaller fraction.")
    return np.sort(order[held_out:]), np.sort(order[:held_out])


@functools.cache  # shared with the ranks that a launcher forks
def _splits(
    arrays: fashion_mnist.Arrays, seed: int, held_out_fraction: float
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels of each split."""
    train, held_out = divide(len(arrays.train_labels), seed, held_out_fraction)
    return {**{split: (arrays.train_images[chosen], arrays.train_labels[chosen])
               for split, chosen in (("train", train), ("validation", held_out))},
            "test": (np.require(arrays.test_images, requirements="W"), arrays.test_labels)}


@functools.cache
def _statistics(
    arrays: fashion_mnist.Arrays, seed: int, held_out_fraction: float
) -> tuple[float, float]:
    images, _ = _splits(arrays, seed, held_out_fraction)["train"]
    mean, std = mean_and_std(images.reshape(1, -1))
    return float(mean[0]), float(std[0])


def mean_and_std(channels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of uint8 pixels; from exact integer sums, so equal on every machine."""
    mean = channels.sum(1, dtype=np.int64) / channels.shape[1]
    squares = np.square(channels, dtype=np.uint16).sum(1, dtype=np.int64) / channels.shape[1]
    return mean, np.sqrt(np.maximum(squares - mean**2, 1))  # 1: avoids a division by 0
