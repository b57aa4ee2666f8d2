"""Operations on nested batches: tuples, dicts, named tuples and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import collate as torchs

SMALL = 128 << 10
"""Size limit in bytes for sending a tensor through a loader worker's pipe. Larger tensors go
through shared memory, which needs a new connection to the worker for each tensor (1 ms)."""

_FIRST = 4
_OWN_COLLATE = ("give them equal shapes in the data set, or define collate(samples) in the task to "
                "pad them")


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to each tensor of a nested batch; other leaves are unchanged."""
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def copy_of(batch: Any) -> Any:
    """A copy of the batch with cloned tensors."""
    return map_tensors(Tensor.clone, batch)


class BatchCopier:
    """Copies batches if the data set reuses one buffer for all of them.

    Several batches are in use at once, so a reused buffer would overwrite earlier ones. The first
    four batches are always copied; comparing them with their copies shows whether the memory is
    reused, and decides about all later batches.
    """

    def __init__(self) -> None:
        self._first: list[tuple[Any, Any]] = []
        self._needed: bool | None = None

    def __call__(self, batch: Any) -> Any:
        if self._needed is False:
            return batch
        own = _map(_twin, batch)
        if self._needed is None:
            if not all(_equal(given, copied) for given, copied in self._first):
                self._needed = True
            elif len(self._first) == _FIRST:
                self._needed = False
            self._first = [*self._first, (batch, own)] if self._needed is None else []
        return own


def _twin(leaf: Any) -> Any:
    """A copy with the same strides: the memory layout may change the bits of a result."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy(order="K")
    if not isinstance(leaf, Tensor) or not leaf.is_leaf:
        return leaf  # part of a graph: a copy would be detached from its users
    if leaf.requires_grad:
        return copy.deepcopy(leaf)  # remains a leaf of the graph
    if not _is_plain(leaf) or not leaf.numel():
        return leaf.clone()
    reach = 1 + sum((n - 1) * by for n, by in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.as_strided((reach,), (1,)).clone().as_strided(leaf.shape, leaf.stride())


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not (
        tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def _equal(batch: Any, other: Any) -> bool:
    """Whether the tensors and arrays of two batches of the same structure are equal."""
    pairs = zip(_leaves(batch), _leaves(other), strict=True)
    return all(one.tobytes() == two.tobytes() if isinstance(one, np.ndarray) else
               not (isinstance(one, Tensor) and _is_plain(one)) or torch.equal(one, two) or (
                   one.is_floating_point() and torch.allclose(one, two, 0, 0, equal_nan=True))
               for one, two in pairs)


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map(note, batch)
    return found


def tensors(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in a batch."""
    yield from (leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor))


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples into a batch as torch's `default_collate` does; also supports dataclasses.

    Raises:
        TypeError, ValueError: the samples can't be stacked; the message gives reason and remedy.
    """
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [f.name for f in dataclasses.fields(first) if f.init]
        return type(first)(**{n: collate([getattr(s, n) for s in samples]) for n in fields})
    if isinstance(first, Mapping):
        try:
            columns = {k: [s[k] for s in samples] for k in first}
        except KeyError as error:
            raise ValueError(f"not all samples have the key {error}; {_OWN_COLLATE}") from error
        return _like(first, {k: collate(column) for k, column in columns.items()})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(collate(column) for column in zip(*samples, strict=True)))
    if isinstance(first, tuple | list):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError(f"{type(first).__name__}s of different lengths, such as "
                             f"{_and({len(s) for s in samples})}, can't be stacked; {_OWN_COLLATE}")
        return type(first)(collate(column) for column in zip(*samples, strict=True))
    try:
        return torchs.collate(list(samples), collate_fn_map=_STACKING)
    except (TypeError, RuntimeError) as error:
        shapes = {tuple(s.shape) for s in samples if isinstance(s, Tensor | np.ndarray)}
        if len(shapes) > 1:
            raise ValueError(f"tensors of different shapes, such as {_and(shapes)}, can't be "
                             f"stacked; {_OWN_COLLATE}") from error
        if "default_collate" in str(error):  # torch's message for an unsupported type
            kind = f"{type(first).__module__}.{type(first).__qualname__}"
            of = f" of {first.dtype}" if isinstance(first, np.ndarray) else ""
            raise TypeError(
                f"{kind.removeprefix('builtins.')}{of} can't be stacked; return a tensor, an "
                "array, a number or a string in its place, or define collate(samples) in the "
                "task") from error
        raise


def _stack(tensors: Sequence[Tensor], *, collate_fn_map: Any) -> Tensor:
    """Stack tensors without shared memory where possible.

    In a loader worker torch's function stacks into shared memory, which is slow for small tensors,
    and casts tensors of mixed dtypes to the dtype of the first.
    """
    first = tensors[0]
    plain = first.layout is torch.strided and not first.is_nested
    if plain and (len(tensors) * first.nbytes <= SMALL or len({t.dtype for t in tensors}) > 1):
        return torch.stack(list(tensors))
    return torchs.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)


_STACKING = {**torchs.default_collate_fn_map, Tensor: _stack}


def _and(differing: Iterable[Any]) -> str:
    return " and ".join(str(one) for one in sorted(differing)[:2])


def empty(batch: Any) -> Any:
    """A batch of the same structure with 0 samples: the first dimension of each tensor is 0."""
    return _map(_without_samples, batch)


def size(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that is not a scalar."""
    return next((len(t) for t in tensors(batch) if t.dim()), 0)


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf of a nested batch.

    A list of strings is a leaf: `default_collate` returns one string per sample.
    """
    if isinstance(batch, Mapping):
        return _like(batch, {k: _map(function, v) for k, v in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [f for f in dataclasses.fields(batch) if f.init]
        return dataclasses.replace(
            batch, **{f.name: _map(function, getattr(batch, f.name)) for f in fields}
        )
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(function, v) for v in batch))
    if isinstance(batch, tuple | list) and not _is_strings(batch):
        return type(batch)(_map(function, v) for v in batch)
    return function(batch)


def _without_samples(leaf: Any) -> Any:
    return leaf[:0] if _is_strings(leaf) or (isinstance(leaf, Tensor) and leaf.dim()) else leaf


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(
        isinstance(v, str | bytes) for v in value)


def _like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return entries
    if isinstance(mapping, MutableMapping):  # a defaultdict's constructor takes other arguments
        result = copy.copy(mapping)
        result.update(entries)
        return result
    return type(mapping)(entries)  # type: ignore[call-arg]


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the batch to a device; asynchronous for pinned tensors."""
    return map_tensors(lambda t: t.to(device, non_blocking=True), batch)
