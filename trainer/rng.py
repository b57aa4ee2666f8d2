"""Randomness as a function of (seed, place), not a stream; and the snapshot of a rank's generators.

Whatever draws a random number finds its generator keyed by *where in the run* the draw happens, so
neither ranks, loader workers, prefetching nor restarts can move it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
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
_seed_numpy, _seed_torch = np.random.seed, torch.default_generator.manual_seed


def key_generators(*parts: int, state: int = 0, devices: bool = True) -> None:
    """Key the process-wide generators (python, numpy, torch CPU and each device) by `parts`, which
    come after those of `state`."""
    key = mix(*parts, state=state)
    _seed_python(key)
    _PYTHON.gauss_next = None
    _seed_numpy(key & 0xFFFFFFFF)
    # torch.manual_seed takes 0.3 ms, mostly for devices that aren't there.
    _seed_torch(key)
    if devices:
        for generator in _device_generators():
            generator.manual_seed(key)


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
