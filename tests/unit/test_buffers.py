"""A model's buffers are put back as they were, wherever the forward has put others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.buffers import Buffers
from trainer.errors import ConfigError
from trainer.parallel import Tally
from trainer.task import Outcome


@pytest.fixture
def model() -> nn.Module:
    made = nn.Module()
    made.register_buffer("mean", torch.zeros(3))
    made.register_buffer("cache", torch.zeros(2), persistent=False)
    return made


def test_a_buffer_that_is_assigned_anew_keeps_its_memory(model: nn.Module) -> None:
    buffers, home = Buffers(model), model.mean
    buffers.keep()

    model.mean = model.mean + 1
    strayed = buffers.strayed
    buffers.bring_home()

    assert strayed
    assert model.mean is home
    assert home.tolist() == [1, 1, 1]
    buffers.put_back()
    assert home.tolist() == [0, 0, 0]


def test_a_cache_that_grows_takes_nothing_of_what_the_others_are_put_back_to(model: nn.Module
                                                                            ) -> None:
    buffers = Buffers(model)
    buffers.keep()

    model.mean.add_(torch.nan)
    model.cache = torch.ones(5)
    buffers.bring_home()
    buffers.put_back()

    assert model.mean.tolist() == [0, 0, 0]
    assert model.cache.tolist() == [1] * 5


def test_a_persistent_buffer_of_another_form_is_refused(model: nn.Module) -> None:
    buffers = Buffers(model)

    model.mean = torch.zeros(4)

    with pytest.raises(ConfigError, match=r"mean \(4,\) float32, and it was \(3,\) float32"):
        buffers.bring_home()


@pytest.mark.parametrize("on_host", [True, False])
def test_what_a_buffer_adds_to_the_sums_changes_no_loss_that_backward_has(on_host: bool) -> None:
    tally, x = Tally(on_host=on_host), torch.tensor(1.0, requires_grad=True)

    loss = tally.add(Outcome(x.exp(), 3), samples=3, replaced=0)  # whose backward wants its result
    tally.wish((), torch.tensor(torch.nan))
    loss.backward()
    first, *_ = tally.take()

    assert x.grad.item() == loss.item()
    assert float(first) != float(first)
    assert [float(total) for total in tally.totals] == [loss.item()]


def test_only_what_some_rank_has_moved_and_was_finite_can_be_spoilt(model: nn.Module) -> None:
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    buffers = Buffers(model)
    buffers.keep()

    buffers.watch({model.mean, model.mask})
    before = buffers.spoilt()
    model.mean.add_(torch.inf)
    model.cache.add_(torch.inf)

    assert before == 0
    assert buffers.spoilt().isnan()
    assert buffers.spoilt(among={model.cache}) is None
    assert buffers.spoilt_names() == ["mean"]
