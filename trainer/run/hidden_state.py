"""State of a model or an optimizer that no checkpoint holds: found, and refused or warned of."""

from __future__ import annotations

import copy
import dataclasses
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer.checkpoint.train_state import CONFIGURED, fits_json
from trainer.distributed.comm_timer import CommunicationTimer
from trainer.distributed.ddp import Objective
from trainer.errors import ConfigError, listed
from trainer.storage import tensorfile
from trainer.telemetry.events import Log

_OWN_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 12
MOST_VALUES = 10_000
"""Maximal number of attributes that are compared."""


def same(one: Any, other: Any) -> bool:
    """Whether two nested structures of tensors and other values are equal; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point() or one.is_complex():
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        return torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and (
            one.tobytes() == other.tobytes())
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(same(getattr(one, f.name), getattr(other, f.name))
                   for f in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def values(
    owner: Any, *, of: Callable[[Tensor], Any] = lambda tensor: copy.deepcopy(tensor.detach()),
    state: bool = True, most: int | None = None,
) -> dict[str, Any]:
    """Numbers, strings, tensors (mapped by `of`) and generator states in an object's attributes, by
    path; with parameters and buffers of modules if `state`."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(item: Any, path: str, depth: int) -> None:
        if most is not None and len(found) >= most:
            return
        if isinstance(item, Tensor):
            found[path] = of(item)
        elif isinstance(item, bool | int | float | complex | str | np.ndarray | np.generic):
            found[path] = copy.deepcopy(item)
        elif isinstance(item, random.Random):
            found[path] = item.getstate()
        elif isinstance(item, torch.Generator):
            found[path] = item.get_state()
        elif isinstance(item, np.random.Generator):
            found[path] = repr(item.bit_generator.state)
        elif isinstance(item, np.random.RandomState):
            found[path] = repr(item.get_state())
        elif depth and id(item) not in seen:
            seen.add(id(item))
            for name, value in _members(item, state):
                walk(value, f"{path}.{name}" if path else name, depth - 1)

    walk(owner, "", _DEPTH)
    return found


def _members(item: Any, state: bool) -> list[tuple[str, Any]]:
    if isinstance(item, nn.Module):
        own = {n: v for n, v in vars(item).items() if n not in _OWN_OF_MODULES}
        held = [*item.named_parameters(recurse=False), *item.named_buffers(recurse=False)]
        return [*own.items(), *(held if state else ()), *item.named_children()]
    if isinstance(item, Mapping):
        return [(str(key), value) for key, value in item.items()]
    if isinstance(item, list | tuple | set | frozenset | deque):
        return [(str(index), value) for index, value in enumerate(item)]
    if isinstance(item, type | types.ModuleType | types.FunctionType | torch.device | torch.dtype
                  | CommunicationTimer):
        return []
    return list(getattr(item, "__dict__", {}).items())


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of entries that are missing in one of the two, or not equal."""
    return [name for name in {**other, **one}
            if name not in one or name not in other or not same(one[name], other[name])]


@dataclass(frozen=True)
class ForwardObservation:
    """The loss after a forward, and attributes of the modules."""

    loss: float
    attributes: dict[str, Any]

    @classmethod
    def of(cls, objective: Objective) -> ForwardObservation:
        loss = objective.accumulator.totals[-1]
        return cls(float(loss), values(objective.model, of=_summary, state=False, most=MOST_VALUES))


def describe_hidden_state(one: ForwardObservation, other: ForwardObservation) -> str:
    """A warning if two computations of a micro-batch with equal state differ, or ""."""
    differs = not same(one.loss, other.loss)
    if names := differing(one.attributes, other.attributes):
        what = (f"the loss depends on it ({one.loss:.9g}, then {other.loss:.9g}), so a restart "
                "gives other bits" if differs else
                "a restart gives other bits if any result depends on it")
        return (f"the model's forward changes {listed(names)}, which no checkpoint holds; {what}. "
                "Make it a buffer (register_buffer with a tensor, changed in place)")
    if differs:
        return (f"a second computation of a micro-batch gives another loss ({one.loss:.9g}, then "
                f"{other.loss:.9g}): it depends on a counter, a random generator or the clock, so a"
                " restart gives other bits. Make it a buffer, and draw from torch, numpy.random or "
                "random directly")
    return ""


def _summary(tensor: Tensor) -> Any:
    """A few bytes that represent a tensor in comparisons."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return str(tensor.shape)
    numbers = tensor.detach()
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    numbers = numbers.cpu().double()  # mps has no float64
    return [str(tensor.shape), numbers.sum().item(), numbers.square().sum().item()]


def check_state_dict(model: nn.Module) -> None:
    """Raise ConfigError if a checkpoint can't hold or restore the model's state."""
    parts = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in parts.items():
        if is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"--task: the model's {name} has no values yet (a lazy module, or the meta device);"
                " model() must initialise it, for example by a call with a batch of zeros.")
    own = {tensor.data_ptr() for tensor in parts.values() if tensor.layout == torch.strided}
    saved = model.state_dict()
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"--task: the model's state_dict has {name!r}, a {type(value).__name__}, but a "
                "checkpoint holds tensors only; make it a buffer (register_buffer with a tensor) "
                "instead of an extra state.")
        if value.layout != torch.strided:
            raise ConfigError(f"--task: the model's {name} is sparse, and a checkpoint cannot hold "
                              "it; make it dense, or register its indices and values.")
        if value.numel() and value.data_ptr() not in own:
            raise ConfigError(
                f"--task: {name!r} of the model's state_dict is a new tensor at each call, so it "
                "could not be restored; a custom state_dict may rename and omit tensors, but not "
                "convert them: make it a buffer (register_buffer with a tensor).")
        try:
            next(tensorfile.serialize({name: value}))
        except TypeError as error:
            raise ConfigError(f"--task: the model's {error}, so a checkpoint cannot hold it; use "
                              "another dtype (two real parts for a complex one).") from None
    held = {tensor.data_ptr() for tensor in saved.values()}
    lost = [n for n, p in model.named_parameters()
            if p.requires_grad and p.numel() and p.data_ptr() not in held]
    if lost:
        raise ConfigError(f"--task: the model's state_dict omits {listed(lost)}, which is "
                          "trainable, so no checkpoint would hold it; include it, or freeze it "
                          "(requires_grad_(False)).")


def watch_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], log: Log
) -> None:
    """Check an optimizer of the user: its state after the first update, and the attributes that
    the second one changes."""
    observed: list[dict[str, Any]] = []

    def check(*_: Any) -> None:
        if not observed:
            check_optimizer_state(optimizer, names)
        public = {n: v for n, v in vars(optimizer).items() if not n.startswith("_")}
        found = values(public, of=_summary, most=MOST_VALUES)
        observed.append({n: v for n, v in found.items()
                         if not {"state", "param_groups", "defaults"} & {*n.split(".")}})
        if len(observed) < 2:
            return
        hook.remove()
        if changed := differing(*observed):
            log.warn_once(
                f"{type(optimizer).__name__}: an update changes its attribute "
                f"{listed(changed)}, which no checkpoint holds; a restart gives other bits "
                "if any result depends on it. Keep it in self.state[parameter] or in the groups")

    hook = optimizer.register_step_post_hook(check)


def _held(item: Any, path: str, depth: int) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Optimizers among an optimizer's attributes, with their path."""
    if isinstance(item, torch.optim.Optimizer):
        yield path, item
    elif depth and isinstance(item, Mapping | list | tuple):
        for key, value in item.items() if isinstance(item, Mapping) else enumerate(item):
            if key not in ("state", "param_groups", "defaults"):
                yield from _held(value, f"{path}[{key!r}]" if path else str(key), depth - 1)


def check_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raise ConfigError if a checkpoint can't hold the optimizer's state."""

    def refuse(what: str) -> None:
        raise ConfigError(f"--optim.name {type(optimizer).__name__}: {what}, which a checkpoint "
                          "cannot hold; keep single tensors in self.state[parameter], and numbers, "
                          "strings and lists of them there or in the groups.")

    for path, inner in _held(vars(optimizer), "", 3):
        if inner.state and inner.state is not optimizer.state:
            refuse(f"its attribute {path}, a {type(inner).__name__}, has a separate state (share "
                   f"the outer one: self.{path}.state = self.state)")
    for owner, entries in optimizer.state.items():
        if owner not in names:
            refuse(f"it has a state under {str(owner)[:40]!r}, which is not a parameter of the "
                   "model")
        for key, value in entries.items():
            if not isinstance(value, Tensor) and not fits_json(value):
                refuse(f"its state has {key!r}, a {type(value).__name__}, for {names[owner]}")
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names", *CONFIGURED) and not (
                    fits_json(value) or callable(value)):
                refuse(f"its groups have {key!r}, a {type(value).__name__}")
