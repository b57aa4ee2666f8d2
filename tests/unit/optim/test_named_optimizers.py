"""Several optimizers of a task: what is refused, and that they are updated in turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.config.schema import Clip, Optim
from trainer.errors import ConfigError
from trainer.optim.named_optimizers import NamedOptimizers, optimizer_of, turns_of

SGD = torch.optim.SGD


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def both(model):
    return {"a": SGD(model[0].parameters(), lr=0.1), "b": (SGD(model[1].parameters()), Clip())}


class Closure(SGD):
    def step(self, closure):
        closure()


def made(optimizers=both, config=None, **members) -> torch.optim.Optimizer:
    task = SimpleNamespace(optimizers=optimizers, **members)
    return optimizer_of(config or Optim(), net(), task)


@pytest.mark.parametrize(("optimizers", "message"), [
    (lambda m: [SGD(m.parameters())], "returned list; it must return a dict of name"),
    (lambda m: {"a": SGD(m.parameters()), "b": 3}, "has 'b': int; it must return a dict"),
    (lambda m: {"a b": SGD(m.parameters())}, "has 'a b': SGD; it must return a dict"),
    (lambda m: {"a": SGD(m[0].parameters())}, "has 1.weight, 1.bias in no optimizer"),
    (lambda m: {"a": SGD(m.parameters()), "b": SGD([m[0].bias])},
     "has 0.bias both in 'a' and in 'b'"),
    (lambda m: {"a": SGD([*m.parameters(), torch.ones(3)])}, r"shape \(3,\) in 'a' that is not a"),
    (lambda m: {"a": Closure(m.parameters())}, "'a': its step() requires closure"),
])  # fmt: skip
def test_optimizers_that_cannot_be_trained_or_saved_are_refused(optimizers, message):
    with pytest.raises(ConfigError, match=message.replace("()", r"\(\)")):
        made(optimizers)


@pytest.mark.parametrize(("members", "message"), [
    *[({"turns": turns}, f"turns is .*{turns[-1]}.*; use a tuple .* such as \\('a', 'b'\\)")
      for turns in (("a", "c"), ("a",), "ab")],
    ({"config": Optim(lr=0.5)}, "--optim.lr 0.5: the task's optimizers"),
    ({"config": Optim(name="sgd")}, "--optim.name sgd: the task's"),
    ({"config": Optim(options=("amsgrad=true",))}, "--optim.options amsgrad=true: "),
])
def test_turns_and_flags_without_effect_are_refused(members, message):
    with pytest.raises(ConfigError, match=message):
        made(**members)


def test_turns_without_optimizers_are_refused():
    with pytest.raises(ConfigError, match=r"the task has no optimizers\(model\)"):
        optimizer_of(Optim(), net(), SimpleNamespace(turns=("a", "b")))


def test_frozen_parameters_are_left_out():
    def optimizers(model):
        model[0].requires_grad_(False)
        return {"a": torch.optim.Adagrad([*model.named_parameters()][:3]),
                "b": SGD([model[1].bias])}

    optimizer = made(optimizers)

    assert [[p.shape for p in group["params"]] for group in optimizer.param_groups] == [[(1, 2)],
                                                                                       [(1,)]]
    assert optimizer.param_groups[0]["param_names"] == ["1.weight"]
    assert len(optimizer.state) == 1
    with pytest.raises(ConfigError, match="has 'a', whose parameters are all frozen"):
        made(lambda m: {"a": SGD(m[0].requires_grad_(False).parameters()),
                        "b": SGD(m[1].parameters())})


def test_a_step_updates_the_selected_optimizer_and_all_have_one_state():
    optimizer = made(lambda m: {"a": torch.optim.Adam(m[0].parameters()),
                                "b": torch.optim.Adagrad(m[1].parameters())}, turns=("a", "b"))
    assert isinstance(optimizer, NamedOptimizers)
    assert turns_of(optimizer) == ("a", "b")
    first, second = (group["params"][0] for group in optimizer.param_groups)
    assert {*optimizer.state} == {*optimizer.param_groups[1]["params"]}, "of Adagrad"

    before = first.clone(), second.clone()
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    optimizer.select("a")
    optimizer.step()

    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert optimizer.state[first]["step"] == 1
