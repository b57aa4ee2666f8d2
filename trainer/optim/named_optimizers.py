"""Several optimizers for the parameters of one model, and whose turn it is in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import Clip, Optim, Schedule
from trainer.errors import ConfigError, listed
from trainer.optim.optimizers import has_modes, make_optimizer, refuse_closure
from trainer.task import method_of

WHAT = "--task: optimizers(model)"
KINDS = (torch.optim.Optimizer, Schedule, Clip)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of several optimizers. Without a schedule or limits of its own it has the run's."""

    optimizer: torch.optim.Optimizer
    schedule: Schedule | None = None
    clip: Clip | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class NamedOptimizers(torch.optim.Optimizer):
    """Several optimizers as one, whose parameter groups and state are theirs: the same objects, so
    that a schedule, a gradient scaler and a checkpoint treat it as any other.

    Args:
        turns: the member that each step updates, in turn; empty if each step updates all of them.
    """

    def __init__(self, members: Mapping[str, Member], turns: Sequence[str] = ()) -> None:
        super().__init__([{"params": []}], {})
        self.members, self.turns = dict(members), tuple(turns)
        for name, member in members.items():
            for group in member.optimizer.param_groups:
                group["optimizer"] = name
            self.state.update(member.optimizer.state)
            member.optimizer.state = self.state
        self.param_groups = [g for m in members.values() for g in m.optimizer.param_groups]
        self._updated = tuple(members)

    def select(self, turn: str) -> None:
        """Let `step` update the member of a turn; "" is all of them."""
        self._updated = (turn,) if turn else tuple(self.members)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the selected members."""
        for name in self._updated:
            self.members[name].optimizer.step()


def members_of(optimizer: torch.optim.Optimizer) -> dict[str, Member]:
    """The members of several optimizers by name; of a single one itself, under ""."""
    return (optimizer.members if isinstance(optimizer, NamedOptimizers)
            else {"": Member(optimizer=optimizer)})


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give all parameters of an SGD a momentum if one has it: the fused kernel needs all."""
    for member in members_of(optimizer).values():
        without = [p for p in member.parameters if not optimizer.state.get(p)]
        if isinstance(member.optimizer, torch.optim.SGD) and len(without) < len(member.parameters):
            for parameter in without:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def turns_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The turns of the steps, which repeat; `("",)` if each step updates everything."""
    return getattr(optimizer, "turns", ()) or ("",)


def optimizer_of(config: Optim, model: nn.Module, task: Any) -> torch.optim.Optimizer:
    """The optimizer of the configuration, or those of the task's `optimizers(model)`."""
    turns = getattr(task, "turns", ())
    if (make := method_of(task, "optimizers")) is None:
        if turns and isinstance(turns, tuple | list):
            raise ConfigError(f"--task: turns is {turns!r}, but the task has no optimizers(model); "
                              "define one that returns an optimizer for each turn.")
        return make_optimizer(config, model, method_of(task, "parameter_groups"))
    _refuse_flags(config)
    members = _checked(make(model), model)
    if turns and (not isinstance(turns, tuple | list) or {*map(str, turns)} != {*members}):
        raise ConfigError(f"--task: turns is {turns!r}; use a tuple with the name of each of the "
                          f"optimizers, such as {tuple(members)!r}.")
    return NamedOptimizers(members, turns)


def _checked(made: Any, model: nn.Module) -> dict[str, Member]:
    """The members that a task returns. Each trainable parameter belongs to exactly one of them."""
    form = ("must return a dict of name: torch.optim.Optimizer, or name: (optimizer, Schedule "
            "and/or Clip of trainer.config.schema)")
    if not isinstance(made, Mapping) or not made:
        raise ConfigError(f"{WHAT} returned {type(made).__name__}; it {form}.")
    members, owner = dict[str, Member](), dict[Tensor, str]()
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
    for name, value in made.items():
        parts = value if isinstance(value, tuple | list) else (value,)
        found: dict[type, Any] = {kind: part for part in parts for kind in KINDS
                                  if isinstance(part, kind)}
        optimizer = found.get(torch.optim.Optimizer)
        if not isinstance(name, str) or not name.isidentifier() or optimizer is None or (
                len(found) < len(parts)):
            raise ConfigError(f"{WHAT} has {name!r}: {type(value).__name__}; it {form}, with names "
                              "such as generator.")
        refuse_closure(type(optimizer), f"{WHAT}, {name!r}")
        if has_modes(optimizer):
            raise ConfigError(f"{WHAT} has {name!r}, a {type(optimizer).__name__} with train() and "
                              "eval(), which is supported only alone, as --optim.name.")
        members[name] = Member(optimizer=optimizer, schedule=found.get(Schedule),
                               clip=found.get(Clip))
        for parameter in members[name].parameters:
            if parameter not in names:
                raise ConfigError(f"{WHAT} has a tensor of shape {tuple(parameter.shape)} in "
                                  f"{name!r} that is not a parameter of the model, so no "
                                  "checkpoint would hold it.")
            if parameter in owner:
                raise ConfigError(f"{WHAT} has {names[parameter]} both in {owner[parameter]!r} and "
                                  f"in {name!r}; give each parameter to one optimizer.")
            owner[parameter] = name
        _drop_frozen(optimizer)
        if not members[name].parameters:
            raise ConfigError(f"{WHAT} has {name!r}, whose parameters are all frozen, by --freeze "
                              "or in model(); leave it out.")
    if left := [n for p, n in names.items() if p.requires_grad and p not in owner]:
        raise ConfigError(f"{WHAT} has {listed(left)} in no optimizer; give each parameter to one, "
                          "or freeze it (--freeze, or requires_grad_(False) in model()).")
    return members


def _drop_frozen(optimizer: torch.optim.Optimizer) -> None:
    """Take frozen parameters out of an optimizer, which would not update them either."""
    for group in optimizer.param_groups:
        trained = [p.requires_grad for p in group["params"]]
        for parameter in [p for p in group["params"] if not p.requires_grad]:
            optimizer.state.pop(parameter, None)
        for key in {"params", "param_names"} & group.keys():
            group[key] = [*compress(group[key], trained)]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _refuse_flags(config: Optim) -> None:
    """Refuse settings of the one optimizer that the task's own ones replace."""
    for name, default in vars(Optim()).items():
        value = getattr(config, name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        config.check(name == "ema" or value == default, name, "the task's optimizers(model) makes "
                     "the optimizers, so the flag would have no effect; omit it, and set the value "
                     "there.", shown)
