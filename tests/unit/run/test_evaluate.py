"""Results of a task's loss, and evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainer.config.schema import Batch, Config
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.evaluate import Evaluator
from trainer.task import Outcome, check_outcome


@pytest.mark.parametrize("name", ["loss", "samples", "epoch", "val_accuracy", "train_loss"])
def test_metric_names_are_neither_reserved_nor_used_twice(name):
    one = torch.ones(())

    for outcome in (Outcome({name: one}, 1), Outcome(one, 1, {name: (1, 1)})):
        with pytest.raises(ConfigError, match=f"a metric '{name}'; .* step, epoch, loss, .* val_"):
            check_outcome(outcome)
    with pytest.raises(ConfigError, match="'box' both as a loss and a metric"):
        check_outcome(Outcome({"box": one, "mask": one}, 1, {"box": (1, 1)}))
    total, metrics = check_outcome(Outcome({"box": one, "mask": one}, 1, {"losses": (1, 2)}))
    assert (total.item(), list(metrics)) == (2, ["box", "mask", "losses"])


def sum_of_outputs(model: nn.Module, batch: Any) -> Outcome:
    return Outcome(model(batch).sum(), len(batch))


def evaluator(
    model: nn.Module | None = None, loss: Any = sum_of_outputs, rank: int = 0, size: int = 1,
    **more: Any,
) -> Evaluator:  # fmt: skip
    """Evaluator of the samples 0 to 3 in batches of two."""
    task = SimpleNamespace(loss=loss)
    world = World(LaunchInfo(rank=rank, size=size), torch.device("cpu"), 1)
    return Evaluator(
        task=task, dataset=[torch.full((1,), float(n)) for n in range(4)],
        model=model or nn.Linear(1, 1), config=Config(task=task, batch=Batch(micro_size=1)),
        world=world, autocast=contextlib.nullcontext, step=lambda: 9,
        **{"marks": ProgressMarks(), **more})


class Counting(IterableDataset):
    def __iter__(self) -> Any:
        return iter([torch.full((1,), float(n)) for n in range(4)])


@pytest.mark.parametrize(("limit", "kept"), [(0, 4), (1, 2), (2, 4), (9, 4)])
@pytest.mark.parametrize("dataset", [[torch.full((1,), float(n)) for n in range(4)], Counting()])
def test_a_limit_counts_batches(limit, kept, dataset):
    assert dataclasses.replace(evaluator(), dataset=dataset, limit=limit)().samples == kept


def test_limited_batches_are_from_all_of_the_data():
    evaluate = dataclasses.replace(
        evaluator(), dataset=[torch.tensor([float(n)]) for n in range(41)], limit=4)
    read, batches = [], evaluate.batches
    evaluate.batches = lambda numbers, limit: batches(read.extend(numbers) or numbers, limit)

    assert evaluate().samples == 8
    assert read == [0, 5, 10, 15]


def by_content(model: nn.Module, batch: Any) -> Outcome:
    return Outcome(model(batch).sum(), len(batch), {"high" if batch[0] > 1 else "low": (1, 2)})


def test_metrics_that_differ_from_batch_to_batch_are_refused():
    with pytest.raises(ConfigError, match=r"metrics \['low'\] for a batch of the evaluation and "
                                          r"\['high'\] for another; return the same for each"):
        evaluator(loss=by_content)()


@pytest.mark.parametrize("other", [["high"], []])
def test_metrics_that_differ_from_rank_to_rank_are_refused_on_each(monkeypatch, other):
    monkeypatch.setattr(World, "gather_json", lambda self, own: [[1, [["low"]]], [1, [other]]])

    for rank in range(2):
        with pytest.raises(ConfigError, match=r"\['low'\] for a batch .* \[.*\] for another"):
            evaluator(loss=by_content, rank=rank, size=2)()


class Caching(nn.Linear):
    """Creates its table of positions in the first forward."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(2.0).unsqueeze(1)
        return super().forward(x) * self.table[: len(x)]


def test_tensors_created_in_an_evaluation_can_be_used_in_training():
    model = Caching(1, 1)
    evaluator(model)()

    model(torch.ones(2, 1)).sum().backward()

    assert model.weight.grad == 1


class Noisy(nn.Linear):
    """Adds noise from its own generator."""

    generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=self.generator)


def test_a_models_own_generator_is_keyed_in_an_evaluation():
    evaluate = evaluator(Noisy(1, 1))

    assert evaluate() == evaluate()


class Observing(nn.Linear):
    """Records its inputs in every mode, like torch.ao's observers."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.mean = 0.5 * (self.mean + x.detach().mean(0))
        return super().forward(x) + self.seen + self.mean


def test_an_evaluation_restores_buffers_and_warns_once():
    model, warnings = Observing(), []
    model(torch.ones(3, 1))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    mean = model.mean
    evaluate = evaluator(model, warn_once=warnings.append)

    scores = evaluate()

    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert model.mean is mean
    assert evaluate() == scores
    assert len(warnings) == 1
    assert "changes its buffers mean, seen in eval mode too" in warnings[0]
