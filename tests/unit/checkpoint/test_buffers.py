"""Buffers are restored in their original storage, even if the forward assigns new tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.buffers import Buffers
from trainer.distributed.ddp import MetricAccumulator
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.task import Outcome
from trainer.telemetry.status import Status


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


def test_what_a_checkpoint_lacks_is_left_by_a_restore_of_the_saved_buffers(
    model: nn.Module
) -> None:
    buffers = Buffers(model)

    model.mean += 1
    model.cache += 1
    buffers.put_back_saved()

    assert model.mean.tolist() == [0, 0, 0]
    assert model.cache.tolist() == [1, 1]
    buffers.put_back()
    assert model.cache.tolist() == [0, 0]


@pytest.mark.parametrize("changes", [False, True])
def test_a_parameter_that_a_step_has_changed_is_not_saved_within_it(changes: bool) -> None:
    model = nn.Linear(2, 1)
    boundary = StepBoundary(model, Status())
    boundary.note_constant_parameters()
    with torch.no_grad():
        model.weight.mul_(2)
    boundary.begin_step()

    if changes:
        with torch.no_grad():
            model.weight.mul_(2)

    assert boundary.take() is not changes


def test_a_growing_cache_does_not_change_the_copies_of_other_buffers(model: nn.Module) -> None:
    buffers = Buffers(model)
    buffers.keep()

    model.mean.add_(torch.nan)
    model.cache = torch.ones(5)
    buffers.restore_storage()
    buffers.put_back()

    assert model.mean.tolist() == [0, 0, 0]
    assert model.cache.tolist() == [1] * 5


def by_assignment(model: nn.Module) -> None:
    model.mean = torch.ones(4)


def in_place(model: nn.Module) -> None:
    model.mean.resize_(4).fill_(1)


def by_data(model: nn.Module) -> None:
    model.mean.data = torch.ones(4)


@pytest.mark.parametrize("change", [by_assignment, in_place, by_data])
def test_a_buffer_may_take_another_shape(model: nn.Module, change) -> None:
    buffers, original = Buffers(model), model.mean
    buffers.keep()

    change(model)
    changed = buffers.changed()
    buffers.restore_storage()
    buffers.agree(World(LaunchInfo(), torch.device("cpu"), 1))

    assert changed
    assert model.mean is original
    assert original.tolist() == [1] * 4
    buffers.put_back()
    assert original.tolist() == [0] * 3


def test_a_persistent_buffer_that_changes_its_dtype_is_refused(model: nn.Module) -> None:
    buffers = Buffers(model)

    model.mean = torch.zeros(3, dtype=torch.float64)

    with pytest.raises(ConfigError, match=r"mean from \(3,\) float32 to \(3,\) float64"):
        buffers.restore_storage()


@pytest.mark.parametrize("change", [
    lambda mean: mean.add_(1), lambda mean: mean.data.add_(1), lambda mean: mean.neg_(),
    lambda mean: F.batch_norm(torch.randn(4, 3), mean, torch.ones(3), training=True)],
    ids=["in place", "data", "sign of zero", "no version"])
def test_a_buffer_that_begins_to_change_is_found_once(model: nn.Module, change) -> None:
    said: list[str] = []
    buffers, world = Buffers(model, warn=said.append), World(LaunchInfo(), torch.device("cpu"), 1)
    buffers.keep()
    before = buffers.changed()

    found = []
    for _ in range(2):
        change(model.mean)
        found.append(buffers.changed())
        buffers.agree(world)
        buffers.keep()

    assert (before, found) == (False, [True, False])
    assert not said
    model.cache.add_(1)
    buffers.agree(world)
    assert "changes cache, registered with persistent=False" in said[0]


def test_a_nan_counts_in_the_step_in_which_its_buffer_begins_to_change(model: nn.Module) -> None:
    model.register_buffer("least", torch.full((2,), torch.inf))
    buffers, world = Buffers(model), World(LaunchInfo(), torch.device("cpu"), 1)
    buffers.keep()

    model.least[0] = 1
    finite = buffers.agree(world)
    buffers.keep()
    model.least[0] = torch.nan
    known = buffers.nonfinite()
    model.mean[1] = torch.nan

    assert not finite
    assert known.isnan()
    assert buffers.agree(world)
    assert buffers.nonfinite_names() == ["mean", "least"]


@pytest.mark.parametrize("on_host", [True, False])
def test_a_nan_added_to_the_sums_does_not_change_the_loss_of_backward(on_host: bool) -> None:
    accumulator, x = MetricAccumulator(on_host=on_host), torch.tensor(1.0, requires_grad=True)

    # exp: backward uses its result
    loss = accumulator.add(Outcome(x.exp(), 3), samples=3, replaced=0)
    accumulator.set_requests((), nonfinite=torch.tensor(torch.nan))
    loss.backward()
    first, *_ = accumulator.take()

    assert x.grad.item() == loss.item()
    assert float(first) != float(first)
    assert [float(total) for total in accumulator.totals] == [loss.item()]


def test_only_changing_values_that_were_finite_are_checked(model: nn.Module) -> None:
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    buffers = Buffers(model)
    buffers.keep()
    model.mean.add_(1)
    model.mask[0] = 1
    buffers.agree(World(LaunchInfo(), torch.device("cpu"), 1))
    buffers.keep()

    before = buffers.nonfinite()
    model.mean.fill_(3e38)  # finite, though not their sum
    assert buffers.nonfinite() == 0
    model.mean.add_(torch.inf)
    model.cache.add_(torch.inf)

    assert before == 0
    assert buffers.nonfinite().isnan()
    assert buffers.nonfinite(among={model.cache}) is None
    assert buffers.nonfinite_names() == ["mean"]
