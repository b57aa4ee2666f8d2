"""Confusion matrices summed over an evaluation, and per-class metrics computed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Figure = Callable[[Mapping[str, float], Tensor | None], float]


def confusion(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Confusion matrix CxC int64: rows are true classes, columns predicted ones. Targets outside 0
    to C - 1 are ignored."""
    predicted, target = predicted.flatten(), target.flatten()
    counted = (target >= 0) & (target < classes)
    place = torch.where(counted, target * classes + predicted, classes * classes)
    counts = place.new_zeros(classes**2 + 1)  # `bincount` would wait for a GPU
    counts.index_add_(0, place, torch.ones_like(place))
    return counts[:-1].reshape(classes, classes)


def hits(predicted: Tensor, target: Tensor) -> Tensor:
    """Multi-label confusion matrices Cx2x2 int64 of binary tensors NxCx…: [c, t, p] counts the
    cases where label c is t and the prediction is p."""
    by_label = predicted.bool().transpose(0, 1).flatten(1), target.bool().transpose(0, 1).flatten(1)
    return torch.stack([
        torch.stack([(by_label[1] == t) & (by_label[0] == p) for p in (False, True)])
        for t in (False, True)
    ]).sum(-1).permute(2, 0, 1)  # fmt: skip


def per_class(table: Tensor) -> dict[str, Tensor]:
    """Precision, recall, F1 and intersection over union of each class (C float64), from a table of
    `confusion` or `hits`. A metric is 0 if its denominator is 0."""
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
    """A function for `Task.figures`: the mean over classes of a metric of `per_class`."""

    def figure(means: Mapping[str, float], table: Tensor | None) -> float:
        assert table is not None, "the loss returns a table in evaluation"
        return float(per_class(table)[name].mean())

    return figure


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)
