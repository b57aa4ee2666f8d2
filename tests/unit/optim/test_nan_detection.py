"""NaN detection: the origin of the first NaN, in forward, loss and backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from trainer.optim.nan_detection import Origin, nan_detector


class Log(nn.Module):
    def forward(self, x):
        return (x - 100).log()


class RootOfZero(nn.Module):
    def forward(self, x):
        return (0 * x).sqrt() * 0  # 0 forwards, 0 · inf backwards


class Objective(nn.Module):
    def __init__(self, inner: nn.Module, divisor: float) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), inner),
                                   nn.Linear(4, 1))
        self.divisor = divisor

    def forward(self, x):
        return self.model(x).mul(self.divisor).div(self.divisor).mean()


@pytest.mark.parametrize(("inner", "divisor", "origin", "text"), [
    (Log(), 1.0, Origin("forward", "1.1", "aten.log.default"),
     "aten.log.default in the forward of module 1.1"),
    (RootOfZero(), 1.0, Origin("backward", "1.1", "aten.div.Tensor", "SqrtBackward0"),
     "aten.div.Tensor in the backward of module 1.1 (SqrtBackward0)"),
    (nn.ReLU(), 0.0, Origin("forward", None, "aten.div.Tensor"),
     "aten.div.Tensor in the forward of the loss, outside the model")])
def test_the_operation_and_the_module_that_create_a_nan_are_named(inner, divisor, origin, text):
    objective, found = Objective(inner, divisor), []

    with nan_detector(objective, objective.model, found.append):
        objective(torch.randn(8, 3)).backward()

    assert found == [origin]
    assert str(origin) == text


def test_finite_values_give_no_report_and_the_same_bits():
    found, gradients = [], []
    for detecting in (False, True):
        torch.manual_seed(0)
        objective = Objective(nn.Dropout(0.5), 1.0)
        with (nan_detector(objective, objective.model, found.append) if detecting
              else contextlib.nullcontext()):
            objective(torch.randn(8, 3)).backward()
        gradients.append([p.grad for p in objective.parameters()])

    assert found == []
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
