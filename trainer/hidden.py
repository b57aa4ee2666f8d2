"""State that no checkpoint holds: what differs when a micro-batch is computed a second time, and
what an optimizer keeps where it isn't looked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.attributes import differing, values
from trainer.errors import ConfigError
from trainer.log import Log
from trainer.state import CONFIGURED, is_plain
from trainer.step import Step

MOST_VALUES = 10_000
"""Attributes of a model that are looked at."""


@dataclass(frozen=True)
class Seen:
    """What a forward came to: the micro-batch's loss, and the plain attributes of the modules."""

    loss: float
    attributes: dict[str, Any]

    @classmethod
    def of(cls, step: Step) -> Seen:
        """After a forward whose sums have been taken."""
        loss = step.objective.tally.totals[-1]
        return cls(float(loss), values(step.model, of=_mark, state=False, most=MOST_VALUES))


def told(one: Seen, other: Seen) -> str:
    """A warning, from the same micro-batch computed twice under the same keys, with the same
    parameters and buffers; empty where all is alike."""
    names = differing(one.attributes, other.attributes)
    lost = one.loss != other.loss and not (math.isnan(one.loss) and math.isnan(other.loss))
    if names:
        where = f"{', '.join(names[:5])}{', …' * (len(names) > 5)}"
        what = (f"and the loss depends on it ({one.loss:.9g}, then {other.loss:.9g}), so a restart "
                "differs" if lost else "so if anything is computed from it, a restart differs")
        return (f"the model's forward changes {where}, which no checkpoint holds, {what}: make it "
                "a buffer (register_buffer with a tensor, changed in place)")
    if lost:
        return (f"the same micro-batch gives another loss the second time ({one.loss:.9g}, then "
                f"{other.loss:.9g}), with the same weights, buffers and seeds: a count, a random "
                "generator or the clock outside of the model's buffers decides it, and a restart "
                "differs; make it a buffer, and draw from torch, numpy.random or random directly")
    return ""


def _mark(tensor: Tensor) -> Any:
    """In place of a tensor that isn't a buffer: what tells it from another, in a few bytes."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return str(tensor.shape)
    numbers = tensor.detach()
    numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    numbers = numbers.cpu().double()  # mps has no float64
    return [str(tensor.shape), numbers.sum().item(), numbers.square().sum().item()]


def watch(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], log: Log) -> None:
    """Look at an optimizer of the user's own after its first two updates, and no more.

    The updates raise: ConfigError: it keeps something that a checkpoint can't hold.
    """
    seen: list[dict[str, Any]] = []

    def look(*_: Any) -> None:
        if not seen:
            refuse_unkept(optimizer, names)
        own = {n: v for n, v in vars(optimizer).items() if not n.startswith("_")}
        found = values(own, of=_mark, most=MOST_VALUES)
        seen.append({n: v for n, v in found.items()
                     if not {"state", "param_groups", "defaults"} & {*n.split(".")}})
        if len(seen) < 2:
            return
        hook.remove()
        if moved := differing(*seen):
            log.announce(
                f"{type(optimizer).__name__}: an update changes its attribute "
                f"{', '.join(moved[:5])}, which no checkpoint holds, so if anything is computed "
                "from it, a restart differs: keep it in self.state[parameter] or in the groups")

    hook = optimizer.register_step_post_hook(look)


def _held(item: Any, path: str, depth: int) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers among an optimizer's attributes, also in lists and dicts, by their path."""
    if isinstance(item, torch.optim.Optimizer):
        yield path, item
    elif depth and isinstance(item, Mapping):
        for key, value in item.items():
            if key not in ("state", "param_groups", "defaults"):
                at = f"{path}[{key!r}]" if path else str(key)
                yield from _held(value, at, depth - 1)
    elif depth and isinstance(item, list | tuple):
        for place, value in enumerate(item):
            yield from _held(value, f"{path}[{place}]", depth - 1)


def refuse_unkept(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raises: ConfigError: the optimizer's state has what a checkpoint can't hold."""
    def refuse(what: str) -> None:
        raise ConfigError(f"--optim.name {type(optimizer).__name__}: {what}, which no checkpoint "
                          "could hold; keep tensors one by one under self.state[parameter], and "
                          "numbers, texts and lists of them there or in the groups.")

    for path, inner in _held(vars(optimizer), "", 3):
        if inner.state and inner.state is not optimizer.state:
            refuse(f"its attribute {path}, a {type(inner).__name__}, keeps a state of its own (let "
                   f"it use this one's: self.{path}.state = self.state)")
    for owner, entries in optimizer.state.items():
        if owner not in names:
            refuse(f"it keeps a state under {str(owner)[:40]!r}, which is no parameter of the "
                   "model's")
        for key, value in entries.items():
            if not isinstance(value, Tensor) and not is_plain(value):
                refuse(f"it keeps {key!r}, a {type(value).__name__}, for {names[owner]}")
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names", *CONFIGURED) and not (
                    is_plain(value) or callable(value)):
                refuse(f"its groups have {key!r}, a {type(value).__name__}")
