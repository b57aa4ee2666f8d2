"""Buffers are restored in their original storage, even if the forward assigns new tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.checkpoint.buffers import Buffers
from trainer.distributed.ddp import MetricAccumulator
from trainer.errors import ConfigError
from trainer.task import Outcome


@pytest.fixture
def model() -> nn.Module:
    made = nn.Module()
    made.register_buffer("mean", torch.zeros(3))
    made.register_buffer("cache", torch.zeros(2), persistent=False)
    return made


def test_a_reassigned_buffer_keeps_its_storage(model: nn.Module) -> None:
    buffers, original = Buffers(model), model.mean
    buffers.keep()

    model.mean = model.mean + 1
    was_reassigned = buffers.was_reassigned
    buffers.restore_storage()

    assert was_reassigned
    assert model.mean is original
    assert original.tolist() == [1, 1, 1]
    buffers.put_back()
    assert original.tolist() == [0, 0, 0]


def test_a_growing_cache_does_not_change_the_copies_of_other_buffers(model: nn.Module) -> None:
    buffers = Buffers(model)
    buffers.keep()

    model.mean.add_(torch.nan)
    model.cache = torch.ones(5)
    buffers.restore_storage()
    buffers.put_back()

    assert model.mean.tolist() == [0, 0, 0]
    assert model.cache.tolist() == [1] * 5


def test_a_persistent_buffer_that_changes_its_shape_is_refused(model: nn.Module) -> None:
    buffers = Buffers(model)

    model.mean = torch.zeros(4)

    with pytest.raises(ConfigError, match=r"mean from \(3,\) float32 to \(4,\) float32"):
        buffers.restore_storage()


@pytest.mark.parametrize("on_host", [True, False])
def test_a_nan_added_to_the_sums_does_not_change_the_loss_of_backward(on_host: bool) -> None:
    accumulator, x = MetricAccumulator(on_host=on_host), torch.tensor(1.0, requires_grad=True)

    # exp: backward uses its result
    loss = accumulator.add(Outcome(x.exp(), 3), samples=3, replaced=0)
    accumulator.set_requests((), torch.tensor(torch.nan))
    loss.backward()
    first, *_ = accumulator.take()

    assert x.grad.item() == loss.item()
    assert float(first) != float(first)
    assert [float(total) for total in accumulator.totals] == [loss.item()]


def test_only_changed_buffers_that_were_finite_are_checked(model: nn.Module) -> None:
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    buffers = Buffers(model)
    buffers.keep()

    buffers.watch({model.mean, model.mask})
    before = buffers.nonfinite()
    model.mean.add_(torch.inf)
    model.cache.add_(torch.inf)

    assert before == 0
    assert buffers.nonfinite().isnan()
    assert buffers.nonfinite(among={model.cache}) is None
    assert buffers.nonfinite_names() == ["mean"]
