"""Averaged weights: same bits as torch's, exchanged in place and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer.optim.ema import Ema


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def updates(model: nn.Module, *after, count: int = 6) -> None:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.0)
    for step in range(count):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for update in after:
            update()


def test_the_average_has_the_bits_of_torchs():
    model = Tied()
    ema = Ema(model, 0.8)
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    updates(model, ema.update, lambda: torchs.update_parameters(model))

    expected = dict(torchs.module.named_parameters())
    assert set(ema.tensors()) == {n for n, p in expected.items() if p.requires_grad}
    for name, value in ema.tensors().items():
        assert torch.equal(value, expected[name]), name
    with ema.exchanged():
        x = torch.randn(8, 3)
        assert torch.equal(model.eval()(x), torchs.eval()(x))


def test_during_an_exchange_the_trained_weights_would_be_saved():
    model = Tied()
    ema = Ema(model, 0.8)
    updates(model, ema.update)
    trained = {n: t.clone() for n, t in model.state_dict().items()}
    average = {n: t.clone() for n, t in ema.tensors().items()}
    addresses = [p.data_ptr() for p in model.parameters()]

    def check_and_fail():
        with ema.exchanged():
            assert all(torch.equal(model.state_dict()[n], average[n]) for n in average)
            assert all(torch.equal(t, trained[n]) for n, t in ema.weights().items())
            assert all(torch.equal(t, average[n]) for n, t in ema.tensors().items())
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        check_and_fail()

    assert all(torch.equal(t, trained[n]) for n, t in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == addresses
