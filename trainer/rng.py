"""Keyed randomness: a function of (seed, place in the run) instead of a stream; RNG snapshots.

Before a random number is drawn, its generator is keyed by the *place in the run* of the draw, so
the number does not depend on ranks, loader workers, prefetching or restarts.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_NUMPY = np.random.mtrand._rand
_PROCESS_WIDE = (_PYTHON, _NUMPY, torch.default_generator)
_seed_python = super(random.Random, _PYTHON).seed

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# A number for each purpose, so that keys of different purposes never collide.
MODEL, DATA, STEP, MICRO, SAMPLE, ORDER, EVALUATE, VECTOR, REPLACE, EPOCH = range(1, 11)


def mix(*parts: int, state: int = 0) -> int:
    """Hash integers to a 64-bit key, by the finaliser of SplitMix64 (Steele, Lea, Flood 2014);
    mix(a, b) equals mix(b, state=mix(a))."""
    for part in parts:
        state = (state + (part & _MASK) * 0xD1B54A32D192ED03 + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_array(base: int, parts: np.ndarray) -> np.ndarray:
    """`mix` of a common `base` with each of N integers; uint64 array of shape (N,)."""
    state = parts.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)  # wraps around
    state += np.uint64((base + _GOLDEN) & _MASK)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def seed_all(*parts: int, state: int = 0, devices: bool = True) -> None:
    """Key the process-wide generators: python, numpy, torch CPU and, with `devices`, the device."""
    key = mix(*parts, state=state)
    # What random.seed, np.random.seed and torch.manual_seed (0.3 ms) do for such a key. Between the
    # passes of a model all of it comes from memory: 30 us, with those functions 75 us.
    _seed_python(key)
    _PYTHON.gauss_next = None
    _NUMPY.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if devices:
        for generator in _device_generators():
            generator.manual_seed(key)


def snapshot() -> dict[str, Any]:
    """States of the process-wide generators as JSON values (bytes as hex)."""
    return _states(random.getstate(), np.random.get_state(), torch.default_generator,
                   *_device_generators())


def keyed(*parts: int) -> dict[str, Any]:
    """What `snapshot` returns after `seed_all(*parts)`; doesn't change the generators."""
    key = mix(*parts)
    return _states(random.Random(key).getstate(),
                   np.random.RandomState(key & 0xFFFFFFFF).get_state(),
                   torch.Generator().manual_seed(key),
                   *(torch.Generator(g.device).manual_seed(key) for g in _device_generators()))


def _states(python: Any, numpy: Any, *generators: Any) -> dict[str, Any]:
    version, internal, gauss = python
    name, keys, position, has_gauss, cached = numpy
    cpu, *devices = (generator.get_state().numpy().tobytes().hex() for generator in generators)
    return {"python": [version, list(internal), gauss],
            "numpy": [name, keys.tobytes().hex(), int(position), int(has_gauss), float(cached)],
            "torch": cpu, "devices": devices}


def digest(state: dict[str, Any]) -> str:
    """Short hash of a snapshot."""
    return hashlib.blake2b(repr(sorted(state.items())).encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the process-wide generators at the end of the context."""
    python, numpy = random.getstate(), np.random.get_state()
    generators = (torch.default_generator, *_device_generators())
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _device_generators() -> tuple[Any, ...]:
    if torch.cuda.is_initialized():
        return (torch.cuda.default_generators[torch.cuda.current_device()],)
    if torch.backends.mps.is_available():
        return (types.SimpleNamespace(  # torch.mps has functions in place of a public generator
            device=torch.device("mps"), manual_seed=torch.mps.manual_seed,
            get_state=torch.mps.get_rng_state, set_state=torch.mps.set_rng_state),)
    return ()


_KINDS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
          torch.Generator)
_FOREIGN = ("builtins", "torch", "typing", "collections", "abc")
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
_MANY = 64
"""Containers with more entries hold samples, not transforms, and are not searched."""


def find_generators(*owners: Any) -> list[Any]:
    """Find `random.Random`, `torch.Generator` and numpy generators in attributes of objects and
    their classes, in wrapped objects (Subset, transforms, functools.partial, …), and in what
    functions refer to."""
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
    if isinstance(item, list | tuple | dict | collections.deque):
        entries = item.values() if isinstance(item, dict) else item
        return entries if len(item) <= _MANY else ()
    if isinstance(item, property):
        return (item.fget,)
    if isinstance(item, types.FunctionType):
        return _referred(item)
    if isinstance(item, types.MethodType | types.BuiltinMethodType | staticmethod | classmethod):
        return (getattr(item, "__func__", None), getattr(item, "__self__", None))
    if isinstance(item, types.GeneratorType):
        return item.gi_frame.f_locals.values() if item.gi_frame else ()
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
    """Defaults, closure variables and global objects of a function, but no library functions."""
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
    """Whether a module belongs to the standard library, an installed package, or the trainer."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (
        file is None or module.startswith("trainer.") or any(part in file for part in _LIBRARIES))


def key(generators: Iterable[Any], *parts: int) -> None:
    """Key generators of an object (see `find_generators`), each by its index."""
    base = mix(VECTOR, *parts)
    for index, generator in enumerate(generators):
        number = mix(index, state=base)
        if isinstance(generator, random.Random):
            generator.seed(number)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(number & 0xFFFFFFFF)
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits.state = type(bits)(number).state
