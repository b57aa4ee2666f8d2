"""The task: what is trained, on what, and how it is judged."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer import Outcome
from trainer.confusion import confusion, per_class
from trainer.task import load_object
from wave_forms.data import FORMS, Waves
from wave_forms.loss import focal


@dataclass(frozen=True)
class WaveForms:
    """Tell wave forms apart. Its fields are its flags: --task.noise 0.5."""

    net: str = "wave_forms.model:Net"
    """The model, as module:Class."""
    noise: float = 0.3
    """Standard deviation of the noise; the waves' amplitude is 1."""
    samples: int = 1920
    """Training samples; a quarter as many to validate, and to test."""
    gamma: float = 2.0
    """How much less known samples weigh in the loss; 0 is plain cross entropy."""

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
        """A metric that is no mean of samples: the recall of the form that is known worst."""
        return {"worst_recall": lambda means, table: float(per_class(table)["recall"].min())}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """What `trainer predict` writes for each sample."""
        shares = torch.softmax(model(batch[0]), 1)
        return {"form": shares.argmax(1), "share": shares.amax(1)}
