"""Randomness as a function of (seed, place), not a stream; and the snapshot of a rank's generators.

Whatever draws a random number finds its generator keyed by *where in the run* the draw happens, so
neither ranks, loader workers, prefetching nor restarts can move it.
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

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# One purpose, one number: keys of different purposes never meet.
MODEL, DATA, STEP, MICRO, SAMPLE, ORDER, EVALUATE, VECTOR, REPLACE = range(1, 10)


def mix(*parts: int, state: int = 0) -> int:
    """A 64-bit key from integers, by the finaliser of SplitMix64 (Steele, Lea, Flood 2014).

    Args:
        state: the key of the parts before these: mix(a, b) is mix(b, state=mix(a)).
    """
    for part in parts:
        state = (state + (part & _MASK) * 0xD1B54A32D192ED03 + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mix_array(base: int, parts: np.ndarray) -> np.ndarray:
    """`mix` of a common `base` with each of N integers; uint64 array of shape (N,)."""
    state = parts.astype(np.uint64)  # a copy; arrays wrap around without a warning
    state *= np.uint64(0xD1B54A32D192ED03)
    state += np.uint64((base + _GOLDEN) & _MASK)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _PYTHON).seed
"""What `random.seed` comes to for a number, after it has looked for texts and bytes."""


def key_generators(*parts: int, state: int = 0, devices: bool = True) -> None:
    """Key the process-wide generators (python, numpy, torch CPU and each device) by `parts`, which
    come after those of `state`."""
    key = mix(*parts, state=state)
    _seed_python(key)
    _PYTHON.gauss_next = None
    np.random.seed(key & 0xFFFFFFFF)
    # torch.manual_seed takes 0.3 ms, mostly for devices that aren't there.
    torch.default_generator.manual_seed(key)
    if devices:
        for generator in _device_generators():
            generator.manual_seed(key)


def key_object(generators: Iterable[Any], *parts: int) -> None:
    """Key generators that an object keeps for itself (see `own_generators`), each by its place."""
    base = mix(VECTOR, *parts)
    for place, generator in enumerate(generators):
        key = mix(place, state=base)
        if isinstance(generator, random.Random):
            generator.seed(key)
        elif isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(key & 0xFFFFFFFF)
        else:
            bits = getattr(generator, "bit_generator", generator)
            bits.state = type(bits)(key).state


_KINDS = (random.Random, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
          torch.Generator)
_FOREIGN = ("builtins", "torch", "typing", "collections", "abc")
_LIBRARIES = (sysconfig.get_path("stdlib"), "site-packages", "dist-packages")
_MANY = 64
"""More entries than that are samples, not transforms."""


def own_generators(*owners: Any) -> list[Any]:
    """The `random.Random`, `torch.Generator` and generators of numpy that objects keep: among
    their attributes and those of their classes, in what they wrap (Subset, ConcatDataset,
    transforms, functools.partial, …), and in what their functions refer to."""
    found: list[Any] = []
    seen = {id(_PYTHON), id(np.random.mtrand._rand), id(torch.default_generator)}
    queue = list(owners)
    for item in queue:  # which grows, and keeps what is in it: an id is one object's
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _KINDS):
            found.append(item)
        elif not isinstance(item, torch.Tensor | np.ndarray | type | types.ModuleType):
            queue.extend(_parts(item))
    return found


def _parts(item: Any) -> Iterable[Any]:
    """What an object of the user's may have a generator in."""
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
    """What a function refers to: defaults, variables of the functions around it, and of what is
    global to it generators, objects, and functions, those of libraries left out."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty yet
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
    """Whether a module is Python's own, or of an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or any(part in file for part in _LIBRARIES))


def snapshot() -> dict[str, Any]:
    """The states of this process's generators as JSON values (bytes as hex)."""
    return _states(random.getstate(), np.random.get_state(), torch.default_generator,
                   _device_generators())


def keyed(*parts: int) -> dict[str, Any]:
    """What `snapshot` gives after `key_generators(*parts)`, from generators of its own: nothing in
    use moves, so any thread may ask."""
    key = mix(*parts)
    return _states(random.Random(key).getstate(),
                   np.random.RandomState(key & 0xFFFFFFFF).get_state(),
                   torch.Generator().manual_seed(key),
                   [torch.Generator(g.device).manual_seed(key) for g in _device_generators()])


def _states(
    python: Any, numpy: Any, cpu: torch.Generator, devices: Iterable[torch.Generator]
) -> dict[str, Any]:
    version, internal, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tobytes().hex(), int(position), int(has_gauss), float(cached)],
        "torch": cpu.get_state().numpy().tobytes().hex(),
        "devices": [generator.get_state().numpy().tobytes().hex() for generator in devices],
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `snapshot` took.

    Raises:
        ValueError: an entry is missing or isn't what `snapshot` wrote.
    """
    try:
        version, internal, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        cpu = _bytes_tensor(state["torch"])
        devices = [_bytes_tensor(entry) for entry in state["devices"]]
        random.setstate((version, tuple(internal), gauss))
        table = np.frombuffer(bytes.fromhex(keys), dtype=np.uint32)
        np.random.set_state((name, table, position, has_gauss, cached))
        torch.default_generator.set_state(cpu)
        for generator, entry in zip(_device_generators(), devices, strict=False):
            generator.set_state(entry)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the saved RNG state is damaged or incomplete: {error!r}") from error


def digest(state: dict[str, Any]) -> str:
    """A short name for a snapshot: equal states have equal digests."""
    return hashlib.blake2b(repr(sorted(state.items())).encode(), digest_size=8).hexdigest()


class preserved:
    """`with preserved():` nothing drawn inside moves the generators outside."""

    def __enter__(self) -> None:
        self._state = snapshot()

    def __exit__(self, *_: object) -> None:
        restore(self._state)


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _device_generators() -> tuple[torch.Generator, ...]:
    if torch.cuda.is_initialized():
        return (torch.cuda.default_generators[torch.cuda.current_device()],)
    if torch.backends.mps.is_available():
        return (torch.mps._get_default_mps_generator(),)
    return ()
