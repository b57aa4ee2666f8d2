"""What a task's loss may return, and where an evaluation stands."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from trainer import faults
from trainer.data.batch import collate
from trainer.errors import ConfigError
from trainer.evaluate import Evaluator
from trainer.faults import Faults, InjectedFault
from trainer.outcome import check_outcome
from trainer.task import Outcome


@pytest.mark.parametrize("name", ["loss", "samples", "step", "epoch", "lr", "val_loss",
                                  "val_accuracy", "train_loss"])
@pytest.mark.parametrize("named_loss", [False, True])
def test_a_metric_with_a_name_that_is_taken_is_refused(name, named_loss):
    one = torch.ones(())
    outcome = Outcome({name: one}, 1) if named_loss else Outcome(one, 1, {name: (1, 1)})

    with pytest.raises(ConfigError, match=f"a metric '{name}'; .* step, epoch, loss, .* val_"):
        check_outcome(outcome)


def test_a_loss_and_a_metric_of_one_name_are_refused():
    one = torch.ones(())

    with pytest.raises(ConfigError, match="'box' as a loss and as a metric"):
        check_outcome(Outcome({"box": one, "mask": one}, 1, {"box": (1, 1)}))


def test_named_losses_and_metrics_stand_side_by_side():
    one = torch.ones(())

    total, metrics = check_outcome(Outcome({"box": one, "mask": one}, 1, {"losses": (1, 2)}))

    assert total.item() == 2
    assert list(metrics) == ["box", "mask", "losses"]


def evaluator(loss: Any, **more: Any) -> Evaluator:
    given = {"rank": 0, "num_ranks": 1, "all_sum": lambda table: table, **more}
    return Evaluator(
        model=nn.Linear(1, 1), loss=loss, dataset=[torch.full((1,), float(n)) for n in range(4)],
        collate=collate, batch_size=2, workers=0, seed=0, device=torch.device("cpu"),
        autocast=contextlib.nullcontext, step=lambda: 9, faults=Faults(), **given,
    )  # fmt: skip


def by_content(model: nn.Module, batch: Any) -> Outcome:
    return Outcome(model(batch).sum(), len(batch), {"high" if batch[0] > 1 else "low": (1, 2)})


def test_metrics_that_differ_from_batch_to_batch_are_refused():
    with pytest.raises(ConfigError, match=r"metrics \['low'\] for a batch of the evaluation and "
                                          r"\['high'\] for another; return the same for each"):
        evaluator(by_content)()


def test_metrics_that_differ_from_rank_to_rank_are_refused_on_each():
    votes, told = [], []

    def gather(vote: torch.Tensor) -> torch.Tensor:
        votes.append(vote)
        raise InterruptedError

    for rank in range(2):
        with pytest.raises(InterruptedError):
            evaluator(by_content, rank=rank, num_ranks=2, all_sum=gather)()
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"on rank . and others elsewhere") as error:
            evaluator(by_content, rank=rank, num_ranks=2, all_sum=lambda _: sum(votes))()
        told.append(str(error.value))

    assert "['low'] on rank 0" in told[0]
    assert "['high'] on rank 1" in told[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_model_in_torchscript_is_evaluated_after_a_training_step():
    evaluate = evaluator(lambda model, batch: Outcome(model(batch).sum(), len(batch)))
    plain = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    losses = []
    for model in (plain, torch.jit.script(plain)):
        model(torch.ones(2, 1)).sum().backward()
        evaluate.model = model
        losses.append(evaluate().loss)

    assert losses[0] == losses[1]


@pytest.mark.parametrize(("epoch", "fires"), [(0, False), (2, True)])
def test_a_fault_of_an_epoch_fires_in_that_epochs_evaluation(epoch, fires):
    def loss(model: nn.Module, batch: Any) -> Outcome:
        return Outcome(model(batch).sum(), len(batch))

    evaluate = Evaluator(
        model=nn.Linear(1, 1), loss=loss, dataset=[torch.ones(1)] * 3, collate=collate,
        batch_size=2, workers=0, seed=0, rank=0, num_ranks=1, device=torch.device("cpu"),
        autocast=contextlib.nullcontext, all_sum=lambda table: table, step=lambda: 9,
        faults=Faults([faults.parse("raise:epoch=2:phase=evaluate")]), epoch=lambda: epoch,
    )  # fmt: skip

    if fires:
        with pytest.raises(InjectedFault, match="at step 9, evaluate"):
            evaluate()
    else:
        assert evaluate().samples == 3
