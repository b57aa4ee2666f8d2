"""AdamW: same bits and state as torch's, and torch's own step when hooks or a profiler need it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer.optim import adamw
from trainer.optim.adamw import AdamW


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(144, 3)).to(memory_format=torch.channels_last)  # fmt: skip


def groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}]


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def both(**options):
    """Two equal models under our optimizer and torch's."""
    ours, theirs = net(), net()
    return (ours, AdamW(groups(ours), lr=0.01, **options), theirs,
            torch.optim.AdamW(groups(theirs), lr=0.01, fused=True, **options))


def assert_equal(ours, optimizer, theirs, expected) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert optimizer.state[mine].keys() == expected.state[other].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, expected.state[other][key]), key


@pytest.fixture
def torchs(monkeypatch):
    """Calls of torch's own step by ours."""
    calls, step = [], adamw._torchs_step
    monkeypatch.setattr(adamw, "_torchs_step", lambda *a: calls.append(a) or step(*a))
    return calls


def test_it_has_the_bits_and_the_state_of_torchs(torchs):
    ours, optimizer, theirs, expected = both(betas=(0.8, 0.95), eps=1e-6)

    for step in range(20):
        for model, each in ((ours, optimizer), (theirs, expected)):
            give_gradients(model, step)
            if step % 3 == 1:  # some parameters, once a whole group, have no gradient
                model[0].weight.grad = model[4].weight.grad = None
            each.param_groups[0]["lr"] = 0.01 / (1 + step)
            each.step()
        assert_equal(ours, optimizer, theirs, expected)

    assert len(torchs) == 1  # the first one creates the state
    assert optimizer.state_dict()["param_groups"] == expected.state_dict()["param_groups"]


def test_its_state_can_be_loaded_by_torchs_and_back(torchs):
    ours, optimizer, theirs, expected = both()
    for step in range(3):
        give_gradients(ours, step)
        optimizer.step()
    theirs.load_state_dict(ours.state_dict())
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    for step in range(3, 6):
        for model, each in ((ours, optimizer), (theirs, expected)):
            give_gradients(model, step)
            each.step()

    assert_equal(ours, optimizer, theirs, expected)
    assert len(torchs) == 1  # not again after load_state_dict


@pytest.mark.parametrize("group", [
    {"amsgrad": True}, {"maximize": True}, {"fused": False}, {"lr": torch.tensor(0.01)},
    {"differentiable": False, "capturable": False, "fused": None, "foreach": True},
])  # fmt: skip
def test_options_that_the_kernel_does_not_support_use_torchs_step(torchs, group):
    ours, optimizer, theirs, expected = both()

    for step in range(4):
        for model, each in ((ours, optimizer), (theirs, expected)):
            each.param_groups[1].update(group)
            give_gradients(model, step)
            each.step()

    assert_equal(ours, optimizer, theirs, expected)
    assert len(torchs) == 4


def test_two_dtypes_in_one_group_use_torchs_step(torchs):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = AdamW(parameters[:1], lr=0.1)
    optimizer.add_param_group({"params": parameters[1:]})

    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert len(torchs) == 1  # each group has one dtype

    mixed = AdamW(parameters, lr=0.1)
    for _ in range(3):
        mixed.step()
    assert len(torchs) == 4


@pytest.mark.parametrize("before", [True, False])
def test_hooks_are_called(before):
    optimizer, calls = AdamW(net().parameters(), lr=0.1), []
    optimizer.step()
    register = optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook
    hook = register(lambda *_: calls.append(1))

    optimizer.step()
    hook.remove()
    optimizer.step()

    assert calls == [1]


def test_hooks_for_all_optimizers_are_called():
    optimizer, calls = AdamW(net().parameters(), lr=0.1), []
    hook = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        optimizer.step()
    finally:
        hook.remove()
    optimizer.step()

    assert calls == [1]


def test_the_profiler_sees_the_step_once():
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    give_gradients(model, 0)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                acc_events=True) as profile:
        optimizer.step()

    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#AdamW.step"] == 1


def test_nothing_changes_if_the_scaler_has_found_an_infinity():
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)

    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))

    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_closure_is_called_and_a_copy_works():
    model = net()
    optimizer = copy.deepcopy(AdamW(model.parameters(), lr=0.1))
    for parameter in (p for g in optimizer.param_groups for p in g["params"]):
        parameter.grad = torch.ones_like(parameter)

    assert optimizer.step(lambda: 3.0) == 3.0
    assert optimizer.step() is None
