"""Captioned images and confusion matrices."""

from __future__ import annotations

import numpy as np
import torch

from trainer.telemetry import drawing


def greener(picture: np.ndarray) -> int:
    """Sum of green minus sum of red; the images themselves are grey."""
    return int(picture[..., 1].sum(dtype=int)) - int(picture[..., 0].sum(dtype=int))


def test_predictions_have_a_caption_green_where_right_and_red_where_wrong():
    images = torch.rand(3, 1, 8, 8)
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])

    right = drawing.predictions(images, logits, [0, 0, 1], ("cat", "dog"))
    wrong = drawing.predictions(images, logits, [1, 1, 0], ("cat", "dog"))

    assert right.shape == (112 + drawing.CAPTION + drawing.GAP, 6 * (112 + drawing.GAP), 3)
    assert greener(right) > 0 > greener(wrong)


def test_a_confusion_matrix_is_dark_where_the_counts_are():
    table = [[8, 2], [0, 5]]

    picture = drawing.matrix(table, ("cat",))  # the class without a name is labelled by its number

    edge, side = 120, drawing.CELL
    assert picture.shape == (edge + 2 * side, edge + 2 * side, 3)
    assert tuple(picture[edge + side, edge + side]) == drawing.RIGHT  # all of the second row
    assert tuple(picture[edge + side, edge]) == (245, 245, 245)
    for names in (picture[edge:, :edge], picture[:edge, edge:]):
        assert names.min() < 100, "the classes are named"
    assert drawing.matrix(np.eye(100).tolist(), ()).shape == (700, 700, 3)
