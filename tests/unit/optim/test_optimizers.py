"""Optimizers compared with plain torch; parameter groups; freezing; clipping."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config.schema import Clip, Optim
from trainer.errors import ConfigError
from trainer.optim import optimizers
from trainer.run.model_modes import eval_mode


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        nn.Identity(), nn.Linear(144, 3))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 20) -> nn.Module:
    for step in range(steps):
        x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def by_hand(model: nn.Module) -> list[dict]:
    """The usual groups: no decay on biases and norms."""
    named = list(model.named_parameters())
    return [{"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}]


@pytest.mark.parametrize(("config", "plain"), [
    (Optim(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
     lambda g: torch.optim.AdamW(g, lr=0.01, betas=(0.8, 0.95), eps=1e-6, fused=True)),
    (Optim(name="sgd", lr=0.01, weight_decay=0.1, momentum=0.0),
     lambda g: torch.optim.SGD(g, lr=0.01, fused=True)),
    (Optim(name="sgd", lr=0.01, weight_decay=0.1, momentum=0.8),
     lambda g: torch.optim.SGD(g, lr=0.01, momentum=0.8, fused=True)),
    (Optim(name="sgd", lr=0.01, weight_decay=0.1, momentum=0.8, nesterov="on"),
     lambda g: torch.optim.SGD(g, lr=0.01, momentum=0.8, nesterov=True, fused=True)),
    (Optim(name="torch.optim:RMSprop", lr=0.01, weight_decay=0.1),
     lambda g: torch.optim.RMSprop(g, lr=0.01))])
def test_an_optimizer_has_the_bits_of_torchs(config, plain):
    ours, expected = net(), net()

    trained(ours, optimizers.make_optimizer(config, ours))
    trained(expected, plain(by_hand(expected)))

    for name, value in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_slice_is_trained_like_a_copy_and_its_base_does_not_change(name):
    config, colours, unused = Optim(name=name, lr=0.01), torch.randn(4, 3, 3, 3), []

    def grey(*, copied: bool) -> nn.Module:  # one channel of a kernel for colours
        model, kernel = net(), colours.clone()[:, 1:2]
        model[0][0].weight = nn.Parameter(kernel.clone() if copied else kernel)
        unused.append(kernel._base[:, 2:])
        return model

    slices, copies = grey(copied=False), grey(copied=True)
    trained(slices, optimizers.make_optimizer(config, slices))
    trained(copies, optimizers.make_optimizer(config, copies))

    torch.testing.assert_close(slices[0][0].weight, copies[0][0].weight, rtol=0, atol=1e-4)
    assert torch.equal(unused[0], colours[:, 2:])


def test_biases_and_norms_of_any_shape_do_not_decay():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm([2, 3]), nn.GroupNorm(1, 2),
                          nn.Embedding(3, 2))
    model.register_parameter("bias", nn.Parameter(torch.ones(2, 2)))

    decay, none = optimizers.parameter_groups(model, 0.1)

    assert (decay["weight_decay"], [n for n, _ in decay["params"]]) == (
        0.1, ["0.weight", "3.weight"])
    assert (none["weight_decay"], [n for n, _ in none["params"]]) == (
        0.0, ["bias", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"])


def test_the_first_matching_pattern_sets_the_rate():
    model = net()

    groups = optimizers.make_optimizer(Optim(lr=0.5, rates=("0.0.*=0.1", "0.*=0.5")),
                                       model).param_groups

    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates == {"2.weight": 0.5, "2.bias": 0.5, "0.0.weight": 0.05, "0.0.bias": 0.05,
                     "0.1.weight": 0.25, "0.1.bias": 0.25}
    assert [g["lr"] for g in groups] == [0.5, 0.5, 0.05, 0.05, 0.25]
    with pytest.raises(ConfigError, match=r"--optim.rates body\.\*: matches no"):
        optimizers.make_optimizer(Optim(rates=("body.*=0.1",)), model)


def test_frozen_parameters_and_their_batch_norm_keep_their_bits():
    model = net()
    frozen = optimizers.freeze(model, ["*", "!2.*"])
    before = copy.deepcopy(model.state_dict())

    trained(model, optimizers.make_optimizer(Optim(lr=0.1, weight_decay=0.5), model))
    with eval_mode(model):
        pass

    assert frozen == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"]
    assert not model[0][1].training
    assert model[0].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("2.")), name


def test_a_partly_frozen_batch_norm_still_updates_its_statistics():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))

    optimizers.freeze(model, ["0.weight", "2.weight"])
    assert [m.training for m in model] == [True, True, True]

    optimizers.freeze(model, ["[01].*"])
    assert [m.training for m in model] == [False, False, True]
    with pytest.raises(ConfigError, match=r"--freeze layer4\.\*: matches no trainable"):
        optimizers.freeze(model, ["layer4.*"])


class Wrapped:
    def __init__(self, groups, lr, weight_decay):
        self.param_groups = groups


@pytest.mark.parametrize(("name", "message"), [
    (f"{__name__}:Wrapped", "it is not a torch.optim.Optimizer"),
    ("torch.optim:Muon", "Muon only supports 2D parameters")])
def test_an_optimizer_that_cannot_be_used_is_refused(name, message):
    with pytest.raises(ConfigError, match=rf"--optim.name {name}: ") as error:
        optimizers.make_optimizer(Optim(name=name), net())

    assert message in str(error.value)


class Own(torch.optim.Optimizer):
    def __init__(self, groups, lr, weight_decay):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Table(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, sparse=sparse)
        self.head = nn.Linear(3, 1)


@pytest.mark.parametrize(("name", "decay", "works"), [
    ("adamw", 0.0, False), ("sgd", 0.0, False), ("torch.optim:Adam", 0.0, False),
    ("torch.optim:SGD", 0.1, False), ("torch.optim:SGD", 0.0, True),
    ("torch.optim:Adagrad", 0.0, True), (f"{__name__}:Own", 0.0, True)])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_gradients_that_torch_would_refuse_are_found_before_the_update(name, decay, works):
    model = Table()
    optimizer = optimizers.make_optimizer(Optim(name=name, weight_decay=decay), model)
    model.head(model.rows(torch.tensor([1, 2]))).sum().backward()

    sparse = {model.rows.weight: "rows.weight"}
    why = optimizers.sparse_gradient_problem(optimizer, Clip(), sparse)

    assert re.match("^$" if works else "the gradient of rows.weight is sparse: ", why)
    assert optimizers.sparse_gradient_problem(optimizer, Clip(value=1.0), sparse)
    if works:
        optimizers.clip(list(model.parameters()), Clip(norm=0.1))
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()


@pytest.mark.parametrize(("groups", "message"), [
    (lambda m: list(m.parameters()), "must return a list of dicts"),
    (lambda m: [{"params": [nn.Parameter(torch.zeros(3))]}], "shape (3,) that is not a parameter"),
    (lambda m: [{"params": m[2].parameters()}, {"params": m.parameters()}], "more than one"),
    (lambda m: [{"params": ["weight"]}], "params is str"),
    (lambda m: [], "is empty")])
def test_invalid_groups_are_refused(groups, message):
    with pytest.raises(ConfigError, match=r"parameter_groups\(") as error:
        optimizers.make_optimizer(Optim(), net(), groups)

    assert message in str(error.value)


def test_a_misspelt_key_of_a_group_is_refused_and_a_custom_key_or_an_empty_group_is_not():
    def groups(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
        return [{"params": []}, {"params": model[2].weight, **keys}]

    with pytest.raises(ConfigError, match="'weigth_decay', which AdamW does not use; did you mean "
                                          "'weight_decay'"):
        optimizers.make_optimizer(Optim(), net(), partial(groups, weigth_decay=0.0))
    kept = optimizers.make_optimizer(Optim(), net(), partial(groups, name="all", lr_scale=0.1))
    group, = kept.param_groups
    assert (group["name"], group["lr_scale"], len(group["params"])) == ("all", 0.1, 1)


def with_gradients(factor: float, *, bad: float | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (300, 7, 1, 64)]
    for parameter in parameters:
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
    if bad is not None:
        parameters[1].grad[3] = bad
    return parameters


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-7, 1 + 1e-7, 1e4])
@pytest.mark.parametrize("limit", [1e-6, 1.0])
def test_clipping_has_the_bits_of_torchs(share, limit):
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradients(1.0)]).item()
    ours, expected = (with_gradients(share * limit / norm) for _ in range(2))

    found = optimizers.clip(ours, Clip(norm=limit))

    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(expected, limit))
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_norm_of_sparse_gradients_sums_entries_of_the_same_row():
    twice = torch.sparse_coo_tensor([[1, 1]], [[1.0], [2.0]], (5, 1),
                                    check_invariants=True)  # the parts of two micro-batches
    parameters = [nn.Parameter(torch.zeros(5, 1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = twice, torch.tensor([4.0])

    assert optimizers.clip(parameters, Clip()).item() == 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_with_a_non_finite_norm_do_not_change(bad):
    ours, before = (with_gradients(1.0, bad=bad) for _ in range(2))

    found = optimizers.clip(ours, Clip(norm=0.1))

    assert not torch.isfinite(found)
    for a, b in zip(ours, before, strict=True):
        assert torch.equal(a.grad.nan_to_num(7.0), b.grad.nan_to_num(7.0))
