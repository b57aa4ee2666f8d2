"""The task: model, data, loss and metrics."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer import Outcome
from trainer.task import load_object
from trainer.telemetry.classification import confusion, per_class
from wave_forms.data import FORMS, Waves
from wave_forms.loss import focal


@dataclass(frozen=True)
class WaveForms:
    """Classify wave forms. The fields become flags: --task.noise 0.5."""

    net: str = "wave_forms.model:Net"
    """The model, as module:Class."""
    noise: float = 0.3
    """Standard deviation of the noise; the waves' amplitude is 1."""
    samples: int = 1920
    """Number of training samples; validation and test have a quarter as many each."""
    gamma: float = 2.0
    """Exponent of the focal loss; 0 is plain cross-entropy."""

    class_names: ClassVar = FORMS

    def model(self) -> nn.Module:
        return load_object(self.net, "--task.net")()

    def dataset(self, split: str) -> Waves:
        return Waves(self.samples if split == "train" else self.samples // 4, self.noise)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        waves, forms = batch
        logits = model(waves)
        guess = logits.argmax(1)
        return Outcome(
            focal(logits, forms, self.gamma), count=len(forms),
            metrics={"accuracy": ((guess == forms).sum(), len(forms))},
            table=confusion(guess, forms, len(FORMS)))

    def figures(self) -> dict[str, Any]:
        """A metric that isn't a mean over samples: the lowest recall of a wave form."""
        return {"worst_recall": lambda means, table: float(per_class(table)["recall"].min())}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """The values that `trainer predict` writes for each sample."""
        shares = torch.softmax(model(batch[0]), 1)
        return {"form": shares.argmax(1), "share": shares.amax(1)}
