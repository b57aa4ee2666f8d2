"""Random generators inside objects of the user: find them, and key them like the process-wide ones.

See `rng`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from trainer import rng

_KINDS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
          torch.Generator)
_PROCESS_WIDE = (random.seed.__self__, np.random.mtrand._rand,  # type: ignore[attr-defined]
                 torch.default_generator)
_FOREIGN = ("builtins", "torch", "typing", "collections", "abc")
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
_MANY = 64
"""Containers with more entries hold samples, not transforms, and are not searched."""


def kept_by(*owners: Any) -> list[Any]:
    """Find `random.Random`, `torch.Generator` and numpy generators in objects.

    The search covers attributes of objects and their classes, wrapped objects (Subset,
    ConcatDataset, transforms, functools.partial, …), and objects that functions refer to.
    """
    found: list[Any] = []
    seen = {id(one) for one in _PROCESS_WIDE}
    queue = list(owners)
    for item in queue:  # it grows, and keeps its items alive, so that ids stay unique
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KINDS):
            found.append(item)
        elif not isinstance(item, torch.Tensor | np.ndarray | type | types.ModuleType):
            queue.extend(_parts(item))
    return found


def _parts(item: Any) -> Iterable[Any]:
    """Parts of an object that may hold a generator."""
    if isinstance(item, list | tuple | dict | collections.deque):
        entries = item.values() if isinstance(item, dict) else item
        return entries if len(item) <= _MANY else ()
    if isinstance(item, types.FunctionType):
        return _referred(item)
    if isinstance(item, types.MethodType | types.BuiltinMethodType | staticmethod | classmethod):
        return (getattr(item, "__func__", None), getattr(item, "__self__", None))
    if isinstance(item, types.GeneratorType):
        return item.gi_frame.f_locals.values() if item.gi_frame else ()
    if isinstance(item, property):
        return (item.fget,)
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    parts = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        if str(kind.__module__).partition(".")[0] not in _FOREIGN:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                mangled = f"_{kind.__name__.lstrip('_')}{name}"
                parts.append(getattr(item, name, getattr(item, mangled, None)))
            parts += vars(kind).values()
    return parts


def _referred(function: types.FunctionType) -> Iterator[Any]:
    """Objects that a function refers to: defaults, closure variables, and global objects.

    Functions of libraries are excluded.
    """
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        found = [function.__globals__.get(name) for name in code.co_names]
        for module in [m for m in found if isinstance(m, types.ModuleType)]:
            if not _is_library(module.__name__):
                found += [vars(module).get(name) for name in code.co_names]
        for value in found:
            if not isinstance(value, types.FunctionType) or (
                    value.__globals__ is function.__globals__ or
                    not _is_library(value.__module__)):
                yield value


@functools.cache
def _is_library(module: str) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or any(part in file for part in _LIBRARIES))


def key(generators: Iterable[Any], *parts: int) -> None:
    """Key generators of an object (see `kept_by`), each by its index."""
    base = rng.mix(rng.VECTOR, *parts)
    for index, generator in enumerate(generators):
        number = rng.mix(index, state=base)
        if isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(number & 0xFFFFFFFF)
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits.state = type(bits)(number).state
