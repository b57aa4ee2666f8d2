"""Built-in task: a generative adversarial network (GAN) of points on a ring of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer.config.fields import Section, setting
from trainer.task import SPLITS, Outcome

_PIXELS, _REACH = 300, 1.5
_REAL, _MADE = (150, 150, 150), (214, 69, 65)


class GAN(nn.Module):
    """A generator of points and a critic that tells them from real ones (Goodfellow et al. 2014).

    Args:
        latent: size of the noise from which a point is made.
    """

    def __init__(self, *, latent: int, width: int) -> None:
        super().__init__()
        self.latent = latent
        self.generator = _perceptron(latent, width, 2)
        self.critic = _perceptron(2, width, 1)

    def forward(self, count: int) -> Tensor:
        """Generate points, count x 2."""
        device = next(self.parameters()).device
        return self.generator(torch.randn(count, self.latent, device=device))


@dataclass(frozen=True, kw_only=True)
class Ring(Section, prefix="task."):
    """Learn the distribution of points around a ring of Gaussians, by a GAN whose two parts are
    trained in turns. `modes` counts the Gaussians that the generator has found."""

    modes: int = setting(8, "must_match", ">= 2")
    """Number of Gaussians on the unit circle."""
    spread: float = setting(0.05, "must_match", "> 0 and < inf")
    """Standard deviation of each of them."""
    points: int = setting(4096, "must_match", ">= 8")
    """Number of training points; validation and test have a quarter as many."""
    latent: int = setting(8, "must_match", ">= 1")
    """Size of the generator's noise."""
    width: int = setting(64, "must_match", ">= 1")
    """Units in each of the two hidden layers of both parts."""
    critic_lr: float = setting(1e-3, "must_match", "> 0 and < inf")
    """Learning rate of the critic."""
    generator_lr: float = setting(1e-3, "must_match", "> 0 and < inf")
    """Learning rate of the generator."""
    seed: int | None = setting(None, "must_match", ">= 0")
    """Determines the points; by default the run's seed."""

    turns: ClassVar[tuple[str, ...]] = ("critic", "critic", "generator")

    def model(self) -> GAN:
        return GAN(latent=self.latent, width=self.width)

    def optimizers(self, model: GAN) -> dict[str, torch.optim.Optimizer]:
        rates = {"critic": self.critic_lr, "generator": self.generator_lr}
        return {name: torch.optim.Adam(getattr(model, name).parameters(), lr=lr, betas=(0.5, 0.9),
                                       fused=True) for name, lr in rates.items()}

    def dataset(self, split: str) -> TensorDataset:
        count = self.points if split == "train" else self.points // 4
        points = draw_ring(count, self.modes, self.spread, (self.seed or 0, SPLITS.index(split)))
        return TensorDataset(torch.from_numpy(points))

    def loss(self, model: GAN, batch: tuple[Tensor], turn: str | None = None) -> Outcome:
        """The non-saturating losses of a turn; in evaluation the critic's, and how many of the
        generated points are close to a Gaussian."""
        real, count = batch[0], len(batch[0])
        made = model(count)
        if turn == "generator":
            return Outcome(functional.softplus(-model.critic(made)).sum(), count)
        real_loss, made_loss = (functional.softplus(sign * model.critic(points)).sum()
                                for sign, points in ((-1, real), (1, made.detach())))
        if turn == "critic":
            return Outcome({"real": real_loss, "made": made_loss}, count)
        near, nearest = self._nearest(made)
        table = torch.bincount(nearest[near], minlength=self.modes)
        return Outcome(real_loss + made_loss, count, {"near": (near.sum(), count)}, table)

    def figures(self) -> dict:
        """`modes`: the Gaussians that have at least a quarter of their share of the points."""
        return {"modes": lambda means, table: (table > table.sum() / (4 * self.modes)).sum()}

    def _nearest(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """For each point, whether it is within 4 deviations of a Gaussian, and of which."""
        centres = torch.from_numpy(ring_centres(self.modes)).to(points)
        distance, nearest = torch.cdist(points, centres).min(1)
        return distance < 4 * self.spread, nearest

    def picture(self, model: GAN) -> np.ndarray:
        """Real points in grey, generated ones in red."""
        image = np.full((_PIXELS, _PIXELS, 3), 255, dtype=np.uint8)
        real = self.dataset("validation").tensors[0].numpy()
        for points, colour in ((real, _REAL), (model(len(real)).float().cpu().numpy(), _MADE)):
            place = ((points * (1, -1) + _REACH) / (2 * _REACH) * (_PIXELS - 1)).round()
            for column, row in place.clip(1, _PIXELS - 2).astype(int):
                image[row - 1 : row + 2, column - 1 : column + 2] = colour
        return image


def ring_centres(modes: int) -> np.ndarray:
    """Centres of the Gaussians, modes x 2, float32."""
    angles = 2 * math.pi * np.arange(modes) / modes
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def draw_ring(count: int, modes: int, spread: float, seed: tuple[int, int]) -> np.ndarray:
    """Draw points of the Gaussians in turn, count x 2, float32."""
    generator = np.random.default_rng(seed)
    centres = ring_centres(modes)[np.arange(count) % modes]
    return (centres + spread * generator.normal(size=(count, 2))).astype(np.float32)


def _perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width),
                         nn.LeakyReLU(0.2), nn.Linear(width, outputs))
