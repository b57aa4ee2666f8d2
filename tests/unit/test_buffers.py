"""A model's buffers are put back as they were, wherever the forward has put others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.buffers import Buffers
from trainer.errors import ConfigError


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
