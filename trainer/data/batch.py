"""Operations on nested batches: tuples, dicts, named tuples and dataclasses of tensors.

Other objects are leaves. One with a method `to` or `pin_memory` moves or pins itself, as with
torch's DataLoader.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from trainer.distributed import torch_private

_TRANSPARENT = (Tensor, str, bytes, int, float, complex, np.generic, type(None))


def rows(batch: Any, samples: int, which: Sequence[int]) -> Any:
    """Some samples of a batch, from its tensors and lists with one row or entry per sample. Raises
    ValueError if a part of it has another length, or is an object."""

    def has_entries(part: Any) -> bool:
        return isinstance(part, tuple | list) and len(part) == samples and not (
            hasattr(part, "_fields") or (part is batch and isinstance(part, tuple)))

    def chosen(part: Any) -> Any:
        if isinstance(part, Tensor) and part.dim() and len(part) == samples:
            return part[list(which)]
        if has_entries(part):
            with contextlib.suppress(ValueError):  # such as the inputs and targets of 2 samples
                if next(tensors(part), None) is not None:
                    return type(part)(rows(entry, samples, which) for entry in part)
            return type(part)(part[index] for index in which)
        if (isinstance(part, Tensor) and part.dim()) or not isinstance(part, _TRANSPARENT):
            raise ValueError("not one row per sample")
        return part

    return _map(chosen, batch, has_entries)


def copy_of(batch: Any) -> Any:
    """A copy of the batch that shares no memory with it, except for tensors with a graph."""
    return _map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, _TRANSPARENT):
        # The copy of a tensor with a graph would belong to the graph.
        return leaf.clone() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf
    with _CloneInDeepcopy():
        return copy.deepcopy(leaf)


class _CloneInDeepcopy(TorchFunctionMode):
    """Context in which `deepcopy` clones tensors. By itself it refuses those with a graph, and
    copies of a view all of the storage, such as that of a whole data set."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:  # fmt: skip
        if function is Tensor.__deepcopy__:
            return _copied(args[0])
        return function(*args, **kwargs or {})


def tensors(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in a batch; those inside other objects can't be seen."""
    return (leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor))


def versions(batch: Any) -> dict[Tensor, int]:
    """A value that differs after a tensor was changed, added, removed or replaced."""
    return {tensor: torch_private.version(tensor) for tensor in tensors(batch)}


def has_objects(batch: Any) -> bool:
    """Whether the batch holds objects in which there may be further tensors or other memory."""
    return not all(isinstance(leaf, _TRANSPARENT) or _is_strings(leaf) for leaf in _leaves(batch))


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _map(note, batch)
    return found


def collate(samples: Sequence[Any]) -> Any:
    """Stack samples as torch's `default_collate` does, in new memory; also supports dataclasses."""
    first = samples[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in dataclasses.fields(first) if f.init]
        return type(first)(**{n: collate([getattr(s, n) for s in samples]) for n in names})
    if isinstance(first, Mapping):
        return _like(first, {key: collate([sample[key] for sample in samples]) for key in first})
    if isinstance(first, tuple | list):
        _refuse_unequal("lengths", {len(sample) for sample in samples})
        columns = [collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, np.ndarray):
        samples = [torch.as_tensor(sample) for sample in samples]
    if isinstance(samples[0], Tensor):
        _refuse_unequal("shapes", {tuple(sample.shape) for sample in samples})
        # In a loader worker `default_collate` casts tensors of mixed dtypes to the first one's.
        return torch.stack(list(samples))
    return default_collate(list(samples))


def _refuse_unequal(what: str, values: set[Any]) -> None:
    if len(values) > 1:
        raise ValueError(f"samples of different {what}, such as "
                         f"{' and '.join(map(str, sorted(values)[:2]))}, can't be stacked; make "
                         "them equal in the data set, or define collate(samples) in the task to "
                         "pad them")


def collated(function: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """The batch that a collate function makes, copied: a task's function may fill the same memory
    each time, but several batches are in use at once."""
    batch = function(samples)
    return batch if function is collate else copy_of(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the batch to a device; asynchronous for pinned tensors."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(type(leaf), "to") else leaf

    return _map(moved, batch, lambda part: hasattr(type(part), "to"))


def pin_memory(batch: Any) -> Any:
    """Copy the batch to page-locked memory."""
    return _map(lambda leaf: leaf.pin_memory() if hasattr(type(leaf), "pin_memory") else leaf,
                batch, lambda part: hasattr(type(part), "pin_memory"))


def _map(function: Callable[[Any], Any], batch: Any,
         is_leaf: Callable[[Any], bool] = lambda part: False) -> Any:  # fmt: skip
    """Apply `function` to each leaf of a nested batch: what is no container, or `is_leaf`.

    A list of strings is a leaf: `default_collate` returns one string per sample.
    """
    if isinstance(batch, Tensor) or is_leaf(batch):
        return function(batch)
    if isinstance(batch, tuple | list) and not _is_strings(batch):
        parts = [_map(function, v, is_leaf) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, Mapping):
        return _like(batch, {k: _map(function, v, is_leaf) for k, v in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [f.name for f in dataclasses.fields(batch) if f.init]
        return dataclasses.replace(
            batch, **{n: _map(function, getattr(batch, n), is_leaf) for n in names})
    return function(batch)


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
