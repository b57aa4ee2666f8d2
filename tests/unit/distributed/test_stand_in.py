"""A stand-in leaves nothing behind in a step, whatever its model and loss do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_step import plain_step
from states import make_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.data.map_dataset import MicroBatch
from trainer.data.order import Order
from trainer.data.sampler import BatchPlan, MicroBatchSampler, MicroBatchSpec
from trainer.distributed.ddp import Objective
from trainer.step import StepResult
from trainer.task import Outcome


class Moving(nn.Module):
    """Buffers that are changed in place, assigned, created, grown, and made by torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("rows", torch.zeros(1, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "such a model can't take 0 samples"
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.table = torch.arange(3.0)
        if len(self.rows) < len(x):
            self.rows.resize_(len(x), 3).zero_()
        return self.head(self.norm(self.body(x - self.mean * self.table)))


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    """Forwards in the backward move buffers too."""
    return checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)


def step(micro_batches: list[MicroBatch], call: Callable[[nn.Module, Tensor], Tensor]
         ) -> tuple[StepResult, dict[str, Any]]:  # fmt: skip
    """The result of a step, and the state and gradients after it."""
    torch.manual_seed(0)
    model, found = Moving(), dict[str, Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: found.update(
        {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters()}))

    def loss(_: nn.Module, batch: Tensor) -> Outcome:
        total = call(model, batch).square().sum()
        return Outcome(total, len(batch), {"most": (batch.max(), 1)})

    objective = Objective(model, loss, num_ranks=1, nominal_count=8, device=torch.device("cpu"))
    result = plain_step(make_state(model, optimizer), objective, objective)(micro_batches)
    assert result is not None
    kept = {n: None if t is None else t.clone()
            for module in model.modules() for n, t in module._buffers.items()}
    return result, found | kept | model.state_dict()


@pytest.mark.parametrize("call", [lambda m, x: m(x), recomputed], ids=["plain", "recomputed"])
@pytest.mark.parametrize("content", [
    torch.full((8, 3), torch.nan), torch.full((2, 3), 1e30), torch.ones(5, 3)],
    ids=["nan", "overflow", "finite"])  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
def test_a_step_with_a_stand_in_has_the_bits_of_one_without(call, content, first):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    specs = [MicroBatchSpec(1, 0, n, n == 1, tuple(range(4))) for n in range(2)]
    real = [MicroBatch(spec, part) for spec, part in zip(specs, x.split(4), strict=True)]
    stand_in = MicroBatch(MicroBatchSpec(1, 0, -1, not first, (), stand_in=(0, 1)), content)

    (expected, before), (found, after) = (step(micro_batches, call) for micro_batches in (
        real, [stand_in, *real] if first else [*real, stand_in]))

    assert found.sums == expected.sums
    assert (found.skip_reason, found.grad_norm) == ("", expected.grad_norm)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value is None and after[name] is None) or torch.equal(value, after[name]), name


def test_ranks_with_fewer_micro_batches_read_the_first_one_of_the_window():
    plan = BatchPlan(samples=13, global_size=8, micro_size=2, drop_last=False)

    def read(rank: int) -> list[MicroBatchSpec]:
        return list(MicroBatchSampler(plan, rank=rank, num_ranks=3, order=Order(),
                                      position=0, total_steps=2))

    assert [(s.number, s.indices, s.stand_in, s.last) for s in read(0)] == [
        (0, (0, 1), (), False), (-1, (), (0, 1), True), (0, (8, 9), (), True)]
    assert [(s.number, s.indices) for s in read(2)] == [(2, (4, 5)), (3, (6, 7)), (2, (12,))]
