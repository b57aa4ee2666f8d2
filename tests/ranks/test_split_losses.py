"""Each loss gives the same update for any split into ranks and unequal micro-batches."""

from __future__ import annotations

import functools

import pytest
import torch
from loss_cases import CASES, one_step

SIZES = (1, 3, 2, 2)
"""Samples per micro-batch; for token losses the number of counted targets differs too."""


def all_losses() -> dict[str, tuple[float, list[float]]]:
    """In a rank: loss and gradient of each case, over the ranks' shares."""
    group = torch.distributed.group.WORLD
    found = {name: one_step(name, SIZES, group) for name in CASES}
    return {name: (loss, gradient.flatten().tolist()) for name, (loss, gradient) in found.items()}


@pytest.fixture(scope="module")
def split(ranks):
    return functools.cache(lambda size: ranks(size, all_losses))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_four_micro_batches_are_one_update_on_any_number_of_ranks(split, name, size):
    _, plain, (output, *others) = CASES[name]
    whole = output.clone().requires_grad_()
    loss = plain(whole, *others)
    loss.backward()

    for rank_loss, values in (result[name] for result in split(size)):
        assert abs(rank_loss - float(loss.detach())) <= 1e-6
        assert float((torch.tensor(values) - whole.grad.flatten()).abs().max()) <= 1e-6
