"""Built-in task in two dimensions: classify points by the arm of a spiral they lie on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer.config.fields import Section, setting
from trainer.task import SPLITS, Outcome
from trainer.tasks import losses
from trainer.tasks.images import CLASS_FIGURES
from trainer.telemetry.classification import Figure

CLASSES = 3
_COLOURS = np.array([(214, 69, 65), (46, 134, 87), (52, 101, 196)], dtype=np.float32)
_PIXELS, _REACH = 300, 1.2


@dataclass(frozen=True, kw_only=True)
class Spiral(Section, prefix="task."):
    """Classify points of the plane that lie on three arms of a spiral."""

    points: int = setting(1500, "must_match", ">= 9")
    """Number of training points; validation and test have a third as many each."""
    noise: float = setting(0.2, "must_match", ">= 0 and < inf")
    """Standard deviation of a point's angle, in radians."""
    width: int = setting(64, "must_match", ">= 1")
    """Units in each of the two hidden layers."""
    label_smoothing: float = setting(0.0, "must_match", ">= 0 and < 1")
    """Share of the target that is spread over all classes, in training only."""
    seed: int | None = setting(None, "must_match", ">= 0")
    """Determines the points; by default the run's seed."""

    def model(self) -> nn.Module:
        """Points Nx2 → logits Nx3."""
        return nn.Sequential(nn.Linear(2, self.width), nn.ReLU(),
                             nn.Linear(self.width, self.width), nn.ReLU(),
                             nn.Linear(self.width, CLASSES))

    def dataset(self, split: str) -> TensorDataset:
        count = self.points if split == "train" else self.points // 3
        points, arms = draw_points(count, self.noise, (self.seed or 0, SPLITS.index(split)))
        return TensorDataset(torch.from_numpy(points), torch.from_numpy(arms))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
        points, arms = batch
        return losses.classification(model(points).float(), arms, training=model.training,
                                     label_smoothing=self.label_smoothing)

    def figures(self) -> dict[str, Figure]:
        return CLASS_FIGURES

    def first_loss(self) -> float:
        return math.log(CLASSES)

    def picture(self, model: nn.Module) -> np.ndarray:
        line = torch.linspace(-_REACH, _REACH, _PIXELS)
        y, x = torch.meshgrid(-line, line, indexing="ij")
        plane = torch.stack([x.flatten(), y.flatten()], 1)
        device = next(model.parameters()).device
        sure = model(plane.to(device)).float().softmax(1).cpu()
        share, arm = sure.max(1)
        strength = ((share.numpy() - 1 / CLASSES) / (1 - 1 / CLASSES))[:, None]
        image = 255 - (255 - _COLOURS[arm.numpy()]) * 0.7 * strength
        image = image.reshape(_PIXELS, _PIXELS, 3)
        points, arms = (tensor.numpy() for tensor in self.dataset("validation").tensors)
        place = ((points * (1, -1) + _REACH) / (2 * _REACH) * (_PIXELS - 1)).round().astype(int)
        for (column, row), of in zip(place.clip(1, _PIXELS - 2), arms, strict=True):
            image[row - 1 : row + 2, column - 1 : column + 2] = _COLOURS[of] * 0.6
        return image.astype(np.uint8)


def draw_points(count: int, noise: float, seed: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Draw points Nx2 float32 on the arms of the spiral, and their labels 0, 1, 2, 0, …"""
    generator = np.random.default_rng(seed)
    arms = np.arange(count) % CLASSES
    radius = generator.random(count)
    angle = 2 * math.pi * (arms / CLASSES + 0.75 * radius) + noise * generator.normal(size=count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return points.astype(np.float32), arms
