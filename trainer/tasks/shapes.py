"""Built-in task on synthetic images of circles, squares and triangles: segmentation or multi-label
classification."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer.config.fields import Section, setting
from trainer.task import SPLITS, Outcome
from trainer.tasks import losses
from trainer.telemetry.classification import Figure, hits, macro

SHAPES = ("circle", "square", "triangle")
SIZE = 32
"""Width and height of an image in pixels."""


class UNet(nn.Module):
    """U-Net with two levels of downsampling (Ronneberger, Fischer, Brox 2015), about 120,000
    parameters. GroupNorm keeps the images of a batch independent of each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fine = _block(1, width)
        self.middle = _block(width, 2 * width)
        self.coarse = _block(2 * width, 4 * width)
        self.up_middle = _block(6 * width, 2 * width)
        self.up_fine = _block(3 * width, width)
        self.head = nn.Conv2d(width, len(SHAPES), 1)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits Nx3x32x32 of images Nx1x32x32."""
        fine = self.fine(images)
        middle = self.middle(functional.max_pool2d(fine, 2))
        coarse = self.coarse(functional.max_pool2d(middle, 2))
        middle = self.up_middle(torch.cat([_twice(coarse), middle], 1))
        return self.head(self.up_fine(torch.cat([_twice(middle), fine], 1)))


@dataclass(frozen=True, kw_only=True)
class Shapes(Section, prefix="task."):
    """Find circles, squares and triangles in noisy grey images, with at most one of each."""

    target: Literal["masks", "labels"] = "masks"
    """masks: the pixels of each shape (segmentation); labels: the shapes present (multi-label)."""
    loss_name: Literal["dice+bce", "bce"] | None = field(
        default=None, metadata={"flag": "loss"})  # `loss` itself is the method
    """Loss of masks: dice+bce if not given; labels always use bce."""
    balanced: bool = False
    """With bce: give positive and negative pixels (or labels) the same total weight."""
    images: int = setting(2000, "must_match", ">= 4")
    """Number of training images; validation and test have a quarter as many each."""
    noise: float = setting(0.15, "must_match", ">= 0 and < inf")
    """Standard deviation of the pixel noise; a shape is 0.4 to 1 brighter than the background."""
    width: int = setting(16, "must_match", ">= 4")
    """Channels at the highest resolution."""
    seed: int | None = setting(None, "must_match", ">= 0")
    """Determines the images; by default the run's seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.width % 4 == 0, "width", "use a multiple of 4.")
        if self.loss_name is None:
            object.__setattr__(self, "loss_name", "dice+bce" if self.target == "masks" else "bce")
        self.check(self.target == "masks" or self.loss_name == "bce", "loss_name",
                   "it is a loss of masks; labels use bce.")
        self.check(not self.balanced or self.target == "labels" or self.loss_name == "bce",
                   "balanced", "masks need the loss bce for it: add --task.loss bce.")

    @property
    def class_names(self) -> tuple[str, ...]:
        return SHAPES

    def model(self) -> nn.Module:
        """Images Nx1x32x32 → logits Nx3x32x32, or Nx3 for labels."""
        if self.target == "masks":
            return UNet(self.width)
        return nn.Sequential(
            _block(1, self.width), nn.MaxPool2d(2), _block(self.width, 2 * self.width),
            nn.MaxPool2d(2), _block(2 * self.width, 4 * self.width), nn.MaxPool2d(SIZE // 4),
            nn.Flatten(), nn.Linear(4 * self.width, len(SHAPES)))

    def dataset(self, split: str) -> TensorDataset:
        """Images and masks Nx3x32x32, or labels Nx3, float32."""
        images, masks = self._drawn(split)
        target = np.asarray(masks if self.target == "masks" else masks.any((2, 3)))
        return TensorDataset(torch.from_numpy(images), torch.from_numpy(target).float())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        images, target = batch
        logits = model(images).float()
        if self.loss_name == "dice+bce":
            loss = losses.named("dice+bce")
        else:
            loss = losses.named("bce", pos_weight=self._pos_weight() if self.balanced else None)
        found = logits.detach() > 0
        right = (found == target.bool()).sum()
        table = None if model.training else hits(found, target)
        total, count = loss(logits, target)
        return Outcome(total, count, {"accuracy": (right, target.numel())}, table)

    def figures(self) -> dict[str, Figure]:
        return {name: macro(name) for name in ("precision", "recall", "f1", "iou")}

    def picture(self, model: nn.Module) -> np.ndarray:
        images, _ = self._drawn("validation")
        images = images[:8]
        device = next(model.parameters()).device
        found = model(torch.from_numpy(images).to(device)).float().sigmoid().cpu().numpy()
        found = np.broadcast_to(found.reshape(len(images), len(SHAPES), *found.shape[2:] or (1, 1)),
                                (len(images), len(SHAPES), SIZE, SIZE))
        rows = [np.repeat(images.clip(0, 1.5) / 1.5, 3, axis=1), found]
        wide = np.concatenate([np.concatenate(list(row), 2) for row in rows], 1)
        return (wide.transpose(1, 2, 0).repeat(3, 0).repeat(3, 1) * 255).astype(np.uint8)

    def _drawn(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        count = self.images if split == "train" else self.images // 4
        return draw(count, self.noise, (self.seed or 0, SPLITS.index(split)))

    def _pos_weight(self) -> tuple[float, ...]:
        _, masks = self._drawn("train")
        present = masks if self.target == "masks" else masks.any((2, 3), keepdims=True)
        return losses.balanced_positive(present.sum((0, 2, 3)).tolist(),
                                        present.size // len(SHAPES))


@functools.lru_cache(maxsize=3)  # each split is used several times
def draw(count: int, noise: float, seed: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw images Nx1x32x32 float32 and masks Nx3x32x32 bool; each shape has probability 1/2."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    shape = (count, len(SHAPES), 1, 1)
    there = generator.random(shape) < 0.5
    radius = generator.uniform(4, 8, shape)
    y = rows - generator.uniform(8, SIZE - 8, shape)
    x = columns - generator.uniform(8, SIZE - 8, shape)
    inside = np.empty((count, len(SHAPES), SIZE, SIZE), dtype=bool)
    inside[:, 0] = (np.hypot(x, y) < radius)[:, 0]
    inside[:, 1] = (np.maximum(abs(x), abs(y)) < 0.85 * radius)[:, 1]
    inside[:, 2] = ((y < 0.7 * radius) & (y > 2 * abs(x) - radius))[:, 2]
    masks = inside & there
    bright = (masks * generator.uniform(0.4, 1.0, shape)).max(1, keepdims=True)
    images = bright + noise * generator.normal(size=(count, 1, SIZE, SIZE))
    return images.astype(np.float32), masks


def _block(channels_in: int, channels_out: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (channels_in, channels_out):
        layers += [nn.Conv2d(channels, channels_out, 3, padding=1, bias=False),
                   nn.GroupNorm(4, channels_out), nn.ReLU()]
    return nn.Sequential(*layers)


def _twice(maps: Tensor) -> Tensor:
    # By copying, because the backward of `interpolate` is nondeterministic on a GPU.
    count, channels, height, width = maps.shape
    pairs = maps[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return pairs.reshape(count, channels, 2 * height, 2 * width)
