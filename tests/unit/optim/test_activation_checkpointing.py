"""Activation checkpointing: the same bits with less memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.optim.activation_checkpointing import blocks, recompute


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))


def net() -> nn.Module:
    torch.manual_seed(0)
    body = nn.ModuleDict({"layers": nn.ModuleList([block(), block(), block()])})
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 1))
    model.add_module("body", body)
    model.forward = lambda x: model[2](
        body["layers"][2](body["layers"][1](body["layers"][0](model[0](x)))))
    return model


def trained(every: int) -> tuple[dict[str, torch.Tensor], int]:
    """The state after some steps, and the bytes that the last forward saved for backward."""
    model = net()
    recompute(model, every)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(5):
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        optimizer.zero_grad()
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(torch.randn(64, 4)).square().mean()
            loss.backward()
        optimizer.step()
    model.eval()
    return model.state_dict() | {"output": model(torch.ones(2, 4))}, kept


def test_recomputed_blocks_give_the_same_bits_and_save_less():
    plain, kept = trained(0)

    for every in (1, 2):
        state, less = trained(every)

        assert list(state) == list(plain)
        assert all(torch.equal(state[n], plain[n]) for n in plain)
        assert less < kept


def test_every_nth_block_is_recomputed():
    model = net()

    assert list(blocks(model)) == ["body.layers.0", "body.layers.1", "body.layers.2"]
    stages = nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block()))
    assert list(blocks(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    assert recompute(model, 2) == ["body.layers.1"]
    assert recompute(net(), 0) == []


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="recompute-every 1: the model has no blocks"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 1)
