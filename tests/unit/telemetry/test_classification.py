"""Confusion matrices and per-class metrics, compared with plain counting."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config.schema import Batch, Config
from trainer.distributed.world import LaunchInfo, World
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.evaluate import Evaluator
from trainer.run.finish import classes
from trainer.task import Outcome
from trainer.telemetry.classification import confusion, hits, macro, per_class
from trainer.telemetry.metrics import LARGEST_TABLE, validation_line
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


class Rule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.squeeze(1) * 3).long()


def evaluate(
    rank: int, num_ranks: int, others: list[list[Tensor]]
) -> tuple[Any, list[Tensor]]:
    """A rank's scores if the other ranks contribute `others` to the sum, and its contribution."""
    own: list[Tensor] = []

    class Ranks(World):
        def gather_json(self, value: Any) -> list[Any]:
            return [value] * num_ranks

        def all_sum(self, tensor: Tensor) -> Tensor:
            own.append(tensor.clone())
            for other in others:
                tensor += other[len(own) - 1]
            return tensor

    def loss(model: nn.Module, batch: Any) -> Outcome:
        x, y = batch
        found = model(x)
        return Outcome((found != y).float().sum(), len(y), table=confusion(found, y, 3))

    figures = {"f1": macro("f1"), "twice": lambda means, table: 2 * means["loss"]}
    generator = torch.Generator().manual_seed(3)
    task = SimpleNamespace(loss=loss, figures=lambda: figures)
    scores = Evaluator(
        task=task, dataset=[(torch.rand(1, generator=generator), i % 3) for i in range(11)],
        model=Rule(), config=Config(task=task, batch=Batch(micro_size=2)),
        world=Ranks(LaunchInfo(rank=rank, size=num_ranks), torch.device("cpu"), 1),
        autocast=contextlib.nullcontext, marks=ProgressMarks(), step=lambda: 1)()
    return scores, own


@pytest.mark.parametrize("num_ranks", [2, 3, 5])  # of 3 batches: with 5 some ranks have none
def test_the_table_and_its_figures_are_the_same_for_any_number_of_ranks(num_ranks):
    alone, _ = evaluate(0, 1, [])
    added = [evaluate(rank, num_ranks, [])[1] for rank in range(num_ranks)]

    together, _ = evaluate(0, num_ranks, added[1:])

    assert alone.table.sum() == 11
    assert together.table.tolist() == alone.table.tolist()
    assert together.metrics == alone.metrics
    assert alone.metrics["twice"] == 2 * alone.loss
    assert alone.metrics["f1"] == macro("f1")({}, alone.table)


def test_the_table_is_in_the_record_and_not_among_the_scalars():
    scores, _ = evaluate(0, 1, [])

    line = validation_line(5, scores, 0.5)

    assert line["val_table"] == scores.table.long().tolist()
    assert all(isinstance(value, float) for value in validation_scalars(line).values())
    side = math.isqrt(LARGEST_TABLE) + 1
    large = type(scores)(loss=1.0, metrics={}, samples=1, table=torch.zeros(side, side))
    assert "val_table" not in validation_line(5, large, 0.5)


def test_classes_are_named_where_the_task_names_them():
    found = classes(torch.tensor([[1.0, 0.0], [1.0, 2.0]]), ["cat"])

    assert found is not None
    assert list(found) == ["cat", "1"]
    assert found["cat"]["recall"] == 1
    assert classes(None, []) is None
    assert classes(torch.zeros(5), []) is None
