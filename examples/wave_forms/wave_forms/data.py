"""Noisy waves, generated when they are read."""

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset

FORMS = ("sine", "square", "triangle", "saw")
POINTS = 64


class Waves(Dataset):
    """Sample i is a wave of form i % 4 (1x64 float32) and the number of the form.

    Random draws come from torch's default generator, which the trainer keys for each sample by
    seed, epoch and index. Each epoch has different waves, and a restart reproduces them.
    """

    def __init__(self, samples: int, noise: float) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        form = index % len(FORMS)
        cycles, phase = 1 + 3 * torch.rand(1), torch.rand(1)
        turn = cycles * torch.linspace(0, 1, POINTS) + phase
        saw = 2 * (turn - turn.floor()) - 1
        sine = torch.sin(2 * math.pi * turn)
        wave = (sine, sine.sign(), 2 * saw.abs() - 1, saw)[form]
        return (wave + self.noise * torch.randn(POINTS)).unsqueeze(0), form
