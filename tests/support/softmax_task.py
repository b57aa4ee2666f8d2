"""The spiral with a softmax at the end of its model, where the loss wants logits."""

from __future__ import annotations

import dataclasses

from torch import nn

from trainer.tasks.spiral import Spiral


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Spiral):
    """Probabilities into cross-entropy."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.Softmax(1))
