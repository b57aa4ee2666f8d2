"""The spiral task with a mistaken softmax at the end of its model: the loss expects logits."""

from __future__ import annotations

import dataclasses

from torch import nn

from trainer.tasks.spiral import Spiral


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Spiral):
    """Passes probabilities to cross-entropy."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), nn.Softmax(1))
