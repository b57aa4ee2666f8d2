"""Each loss with torch's equivalent and inputs of eight samples; the trainer's step over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from plain_step import plain_step
from states import make_state
from torch import Tensor, nn
from torch.nn import functional

from trainer import Outcome
from trainer.config.schema import Clip
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.ddp import Objective, wrap
from trainer.tasks import losses

WEIGHT = (0.5, 2.0, 1.0, 3.0)
CLASSES = len(WEIGHT)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape: int, below: int = CLASSES, seed: int = 1) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def dice_bce(output: Tensor, target: Tensor) -> Tensor:
    """Plain torch, mask by mask."""
    parts = []
    for logits, mask in zip(output.flatten(0, 1), target.flatten(0, 1), strict=True):
        share = torch.sigmoid(logits)
        dice = (2 * (share * mask).sum() + 1) / (share.sum() + mask.sum() + 1)
        cross = functional.binary_cross_entropy_with_logits(logits, mask)
        parts.append(0.5 * (1 - dice) + 0.5 * cross)
    return torch.stack(parts).mean()


def softened_kl(output: Tensor, teacher: Tensor) -> Tensor:
    own, other = (functional.log_softmax(x / 3, 1) for x in (output, teacher))
    return 9 * functional.kl_div(own, other, reduction="batchmean", log_target=True)


def ignoring() -> Tensor:
    target = numbers(8, 5)
    target[0], target[3, 1:], target[6, ::2] = -1, -1, -1
    return target


LOGITS, LABELS, YES = noise(8, CLASSES), numbers(8), numbers(8, CLASSES, below=2).float()
FLOATS = noise(8, 3), noise(8, 3, seed=1)
TOKENS = noise(8, CLASSES, 5), ignoring()
CLASS_WEIGHT = torch.tensor(WEIGHT)
cross_entropy = partial(losses.named, "cross-entropy")

Plain = Callable[..., Tensor]
CASES: dict[str, tuple[Any, Plain, tuple[Tensor, ...]]] = {
    "cross-entropy": (cross_entropy(), nn.CrossEntropyLoss(), (LOGITS, LABELS)),
    "weighted": (cross_entropy(weight=WEIGHT), nn.CrossEntropyLoss(CLASS_WEIGHT),
                 (LOGITS, LABELS)),
    "smoothed": (cross_entropy(weight=WEIGHT, label_smoothing=0.1),
                 nn.CrossEntropyLoss(CLASS_WEIGHT, label_smoothing=0.1), (LOGITS, LABELS)),
    "tokens": (cross_entropy(ignore_index=-1, label_smoothing=0.1),
               nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1), TOKENS),
    "weighted tokens": (cross_entropy(ignore_index=-1, weight=WEIGHT),
                        nn.CrossEntropyLoss(CLASS_WEIGHT, ignore_index=-1), TOKENS),
    "probabilities": (cross_entropy(weight=WEIGHT), nn.CrossEntropyLoss(CLASS_WEIGHT),
                      (LOGITS, noise(8, CLASSES, seed=3).softmax(1))),
    "bce": (losses.named("bce"), nn.BCEWithLogitsLoss(), (LOGITS, YES)),
    "bce, pos_weight": (losses.named("bce", pos_weight=WEIGHT),
                        nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT), (LOGITS, YES)),
    "bce of masks": (losses.named("bce", pos_weight=WEIGHT),
                     nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT.reshape(-1, 1, 1)),
                     (noise(8, CLASSES, 3, 3), numbers(8, CLASSES, 3, 3, below=2).float())),
    "mse": (losses.named("mse"), nn.MSELoss(), FLOATS),
    "huber": (losses.named("huber", delta=0.3), nn.HuberLoss(delta=0.3), FLOATS),
    "margin-ranking": (losses.named("margin-ranking", margin=0.2), nn.MarginRankingLoss(0.2),
                       (noise(8), noise(8, seed=1), 2.0 * numbers(8, below=2) - 1)),
    "kl": (losses.named("kl", temperature=3.0), softened_kl,
           (LOGITS, noise(8, CLASSES, seed=1))),
    "dice+bce": (losses.named("dice+bce"), dice_bce,
                 (noise(8, 2, 6, 6), numbers(8, 2, 6, 6, below=2).float())),
}


class Given(nn.Module):
    """A model whose outputs are its parameters."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, rows: Tensor) -> Tensor:
        return self.values[rows]


def one_step(name: str, sizes: Sequence[int]) -> tuple[float, Tensor]:
    """Loss and gradient of the trainer's step over micro-batches of these sizes."""
    loss, _, (output, *others) = CASES[name]
    model, found, device = Given(output), list[Tensor](), torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: found.append(model.values.grad.clone()))
    objective = Objective(model, lambda m, batch: Outcome(*loss(m(batch[0]), *batch[1:])),
                          num_ranks=1, nominal_count=8, device=device)
    step = plain_step(make_state(model, optimizer), objective,
                      wrap(objective, group=None, device=device, bucket_mb=1), clip=Clip(norm=0))
    rows = torch.arange(len(output)).split(list(sizes))
    result = step([
        MicroBatch(MicroBatchSpec(1, 0, number, number == len(rows) - 1, tuple(part.tolist())),
                   (part, *(other[part] for other in others)))
        for number, part in enumerate(rows)])
    assert result is not None
    assert result.loss is not None
    return result.loss, found[0]
