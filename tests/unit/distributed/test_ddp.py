"""The sums of a step, which the gradient all-reduce carries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer import Outcome
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.ddp import CAPACITY, Objective, with_own_gradients


def test_counts_are_whole_after_the_reduction_and_losses_are_as_computed():
    def loss(model: nn.Module, batch: Tensor) -> Outcome:
        total = model(batch).sum()
        return Outcome({"one": total, "two": total}, len(batch), {"hits": (2, 3)})

    off = 1 + 2e-7  # of three times the mean over three ranks
    objective = Objective(nn.Linear(1, 1), loss, num_ranks=3, nominal_count=1,
                          device=torch.device("cpu"))
    objective(torch.ones(2, 1), 2, ())
    objective.stats_carrier.grad = torch.full((CAPACITY,), off)

    sums, _ = objective.read_sums(objective.take_sums(3), [])

    near = float(torch.tensor(off)) * 3
    assert near not in (1.0, 3.0)
    assert (sums.loss, sums.count, sums.samples) == (near, 3.0, 3)
    assert sums.metrics == {"one": (near, 3.0), "two": (near, 3.0), "hits": (3.0, 3.0)}


def test_the_next_run_of_a_cuda_graph_does_not_overwrite_gradients():
    weight, memory_of_graph = nn.Parameter(torch.zeros(2)), torch.empty(2)
    micro_batches = [MicroBatch(MicroBatchSpec(1, 0, n, n == 2, (n,)), None) for n in range(3)]

    for number, _ in enumerate(with_own_gradients([weight], micro_batches), start=1):
        memory_of_graph.fill_(number)
        if weight.grad is None:
            weight.grad = memory_of_graph  # as autograd, without a copy
        else:
            weight.grad += memory_of_graph

    assert weight.grad.tolist() == [6.0, 6.0]
