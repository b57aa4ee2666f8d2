"""The sums of a step, which the gradient all-reduce carries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer import Outcome
from trainer.distributed.ddp import CAPACITY, Objective


def test_counts_are_whole_after_the_reduction_and_losses_are_as_computed():
    def loss(model: nn.Module, batch: Tensor) -> Outcome:
        total = model(batch).sum()
        return Outcome({"one": total, "two": total}, len(batch), {"hits": (2, 3)})

    off = 1 + 2e-7  # of three times the mean over three ranks
    objective = Objective(nn.Linear(1, 1), loss, num_ranks=3, nominal_count=1,
                          device=torch.device("cpu"))
    objective(torch.ones(2, 1), 2, ())
    objective.stats_carrier.grad = torch.full((CAPACITY,), off)

    sums, *_ = objective.read_sums(objective.take_sums(3), torch.tensor(0.0))

    near = float(torch.tensor(off)) * 3
    assert near not in (1.0, 3.0)
    assert (sums.loss, sums.count, sums.samples) == (near, 3.0, 3)
    assert sums.metrics == {"one": (near, 3.0), "two": (near, 3.0), "hits": (3.0, 3.0)}
