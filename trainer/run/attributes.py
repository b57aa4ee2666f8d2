"""Values in an object's attributes, and equality of nested values."""

from __future__ import annotations

import copy
import dataclasses
import random
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.distributed.comm_timer import Communication

_OWN_OF_MODULES = frozenset(vars(nn.Module()))
_DEPTH = 12


def same(one: Any, other: Any) -> bool:
    """Whether two nested structures of tensors and other values are equal; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.is_floating_point() or one.is_complex():
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and (
            one.tobytes() == other.tobytes())
    if type(one) is not type(other):
        return False
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
    """Collect numbers, strings, tensors and generator states in an object's attributes.

    The search is recursive; the keys are paths.

    Args:
        of: maps a tensor to the collected value.
        state: include parameters and buffers of modules.
        most: maximal number of values; None: no limit.
    """
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
        held = {**item._parameters, **item._buffers} if state else {}
        return list({**own, **held, **item._modules}.items())
    if isinstance(item, Mapping):
        return [(str(key), value) for key, value in item.items()]
    if isinstance(item, list | tuple | set | frozenset | deque):
        return [(str(index), value) for index, value in enumerate(item)]
    if isinstance(item, type | types.ModuleType | types.FunctionType | torch.device | torch.dtype
                  | Communication):
        return []
    return list(getattr(item, "__dict__", {}).items())


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of entries that are missing in one of the two, or not equal."""
    return [name for name in {**other, **one}
            if name not in one or name not in other or not same(one[name], other[name])]
