"""Tables of counts, added over a whole evaluation, and what follows from them for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Figure = Callable[[Mapping[str, float], Tensor | None], float]


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """How often a class (row) was taken for a class (column): CxC int64; targets outside of 0 to
    C - 1 aren't counted."""
    predicted, target = predicted.flatten(), target.flatten()
    counted = (target >= 0) & (target < classes)
    place = torch.where(counted, target * classes + predicted, classes * classes)
    return torch.bincount(place, minlength=classes**2 + 1)[:-1].reshape(classes, classes)


def hits(predicted: Tensor, target: Tensor) -> Tensor:
    """Of yes or no for each of C labels, NxCx…: Cx2x2 int64, where [c, t, p] counts how often
    label c was t and was predicted as p."""
    by_label = predicted.bool().transpose(0, 1).flatten(1), target.bool().transpose(0, 1).flatten(1)
    return torch.stack([
        torch.stack([(by_label[1] == t) & (by_label[0] == p) for p in (False, True)])
        for t in (False, True)
    ]).sum(-1).permute(2, 0, 1)  # fmt: skip


def per_class(table: Tensor) -> dict[str, Tensor]:
    """Precision, recall, F1 and intersection over union of each class, of either table: C float64;
    0 where nothing was predicted, or there was nothing to find."""
    table = table.double()
    if table.dim() == 3:
        right, missed, wrong = table[:, 1, 1], table[:, 1, 0], table[:, 0, 1]
    else:
        right = table.diagonal()
        missed, wrong = table.sum(1) - right, table.sum(0) - right
    return {"precision": _share(right, right + wrong), "recall": _share(right, right + missed),
            "f1": _share(2 * right, 2 * right + wrong + missed),
            "iou": _share(right, right + wrong + missed)}  # fmt: skip


def macro(name: str) -> Figure:
    """The mean over classes of one of `per_class`, as a task's figure."""

    def figure(means: Mapping[str, float], table: Tensor | None) -> float:
        assert table is not None, "the loss gives a table in evaluation"
        return float(per_class(table)[name].mean())

    return figure


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)
