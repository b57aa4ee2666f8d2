"""Nested Python values as JSON, without pickle: the states of data sources.

What JSON has no form for is a dict with one key, a tag: `{"$tuple": [1, 2]}`. An array is an npy
file and a tensor a safetensors file, in base64.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.torch import load, save
from torch import Tensor


def encode(value: Any) -> Any:
    """A JSON value from which `decode` makes an equal one, which shares no memory with it.

    None, numbers, strings, bytes, numpy arrays and scalars, tensors (which come back on the CPU),
    and lists, tuples, sets and dicts of these. A subclass comes back as its base class.

    Raises:
        TypeError: it contains anything else, or itself; names the place.
    """
    try:
        text = json.dumps(value)
        if "$" not in text and (plain := json.loads(text)) == value:
            return plain  # most states are JSON values, for which this is faster
    except (TypeError, ValueError):  # ValueError: it contains itself
        pass
    try:
        return _encoded(value, "")
    except RecursionError:
        raise TypeError("it contains itself, or is nested too deeply") from None


def decode(value: Any) -> Any:
    """A new object from a JSON value of `encode`."""
    return json.loads(json.dumps(value), object_hook=_restored)


def _encoded(value: Any, place: str) -> Any:
    if isinstance(value, Tensor):
        return {"$tensor": _file(place, lambda: save({"": value.detach().cpu().contiguous()}))}
    if isinstance(value, np.ndarray | np.generic):
        return {"$numpy": [_file(place, lambda: _npy(value)), isinstance(value, np.generic)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        items = [[_encoded(key, f"{place}[the key {key!r}]"), _encoded(entry, f"{place}[{key!r}]")]
                 for key, entry in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {"$dict": items}
    if isinstance(value, list | tuple | set | frozenset):
        entries = [_encoded(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
        tag = next((f"${kind.__name__}" for kind in (tuple, set, frozenset)
                    if isinstance(value, kind)), None)
        return entries if tag is None else {tag: entries}
    raise TypeError(
        f"{place or 'it'} is a {type(value).__module__}.{type(value).__qualname__}, which can't be "
        "saved; use numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets and "
        "dicts of these")


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return file.getvalue()


def _file(place: str, make: Callable[[], bytes]) -> str:
    """The bytes of a file in base64; `place` is that of the value in it."""
    try:
        return base64.b64encode(make()).decode()
    except Exception as error:  # a sparse tensor, an array of objects
        raise TypeError(f"{place or 'it'} can't be saved: {error}") from error


def _array(entries: tuple[str, bool]) -> Any:
    text, is_scalar = entries
    array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array[()] if is_scalar else array


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple, "$set": set, "$frozenset": frozenset, "$dict": dict,
    "$bytes": base64.b64decode, "$numpy": _array,
    "$tensor": lambda text: load(base64.b64decode(text))[""]}


def _restored(entries: dict[str, Any]) -> Any:
    if len(entries) != 1:
        return entries
    (tag, content), = entries.items()
    return _RESTORE[tag](content) if tag in _RESTORE else entries
