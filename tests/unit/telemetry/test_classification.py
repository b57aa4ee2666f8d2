"""Confusion matrices and per-class metrics, compared with plain counting."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.run.evaluate import Scores
from trainer.run.finish import classes
from trainer.telemetry.classification import confusion, hits, macro, per_class
from trainer.telemetry.metrics import LARGEST_TABLE, METRIC_LINE, validation_line
from trainer.telemetry.tensorboard import validation_scalars


def test_rows_are_the_true_class_and_targets_outside_are_left_out():
    predicted, target = torch.tensor([[0, 1, 1, 2], [2, 2, 0, 1]]), torch.tensor(
        [[0, 1, 2, 2], [2, -100, 3, 0]])

    assert confusion(predicted, target, 3).tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 2]]
    assert confusion(predicted[:0], target[:0], 3).sum() == 0


def test_hits_count_each_label_for_itself():
    predicted = torch.tensor([[1, 0], [1, 1], [0, 0]])
    target = torch.tensor([[1, 0], [0, 1], [0, 1]])

    assert hits(predicted, target).tolist() == [[[1, 1], [0, 1]], [[1, 0], [1, 1]]]
    assert hits(predicted[:0], target[:0]).shape == (2, 2, 2)
    masks = torch.rand(3, 2, 4, 4) > 0.5
    assert hits(masks, masks).sum() == masks.numel()


@pytest.mark.parametrize("multi_label", [False, True])
def test_figures_of_each_class_are_those_of_counting(multi_label):
    generator = torch.Generator().manual_seed(2)
    if multi_label:
        found, true = (torch.randint(2, (50, 3), generator=generator).bool() for _ in range(2))
        table = hits(found, true)
    else:
        labels = [torch.randint(3, (50,), generator=generator) for _ in range(2)]
        table = confusion(labels[0], labels[1], 3)
        found, true = (torch.stack([label == c for c in range(3)], 1) for label in labels)

    figures = per_class(table)

    for c in range(3):
        right = int((found[:, c] & true[:, c]).sum())
        precision, recall = right / int(found[:, c].sum()), right / int(true[:, c].sum())
        assert float(figures["precision"][c]) == pytest.approx(precision)
        assert float(figures["recall"][c]) == pytest.approx(recall)
        assert float(figures["f1"][c]) == pytest.approx(
            2 * precision * recall / (precision + recall))
        assert float(figures["iou"][c]) == pytest.approx(
            right / int((found[:, c] | true[:, c]).sum()))
    assert macro("f1")({}, table) == pytest.approx(float(figures["f1"].mean()))
    # A class without targets and predictions has zeros.
    assert all(v.tolist() == [1, 0] for v in per_class(torch.tensor([[3, 0], [0, 0]])).values())


@pytest.mark.parametrize(("shape", "is_kept"), [
    ((2, 2), True), ((8,), True), ((3, 2, 2), True), ((math.isqrt(LARGEST_TABLE) + 1,) * 2, False),
    ((), False), ((0, 2), False)])
def test_a_table_is_in_the_record_and_not_among_the_scalars(shape, is_kept):
    table = torch.ones(shape)
    scores = Scores(loss=1.0, metrics={"f1": 0.5}, samples=1, table=table)

    line = validation_line(5, {"validation": scores}, 0.5)

    assert line.get("val_table") == (table.tolist() if is_kept else None)
    assert METRIC_LINE.problem(line) == ""
    assert all(isinstance(value, float) for value in validation_scalars(line).values())


def test_classes_are_named_where_the_task_names_them():
    found = classes(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), ["cat"])

    assert found is not None
    assert list(found) == ["cat", "1"]
    assert found["cat"]["recall"] == 1
    assert classes(None, []) is None
    assert classes(torch.zeros(5), []) is None
