"""Operations on nested batches: tuples, dicts, named tuples and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to each tensor of a nested batch; other leaves are unchanged."""
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def copy_of(batch: Any) -> Any:
    """A copy of the batch with copied tensors and arrays."""
    return _map(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, Tensor) or leaf.requires_grad:  # its copy would belong to its graph
        return leaf
    return leaf.clone()


def tensors(batch: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in a batch."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    yield from found


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


def empty(batch: Any) -> Any:
    """A batch of the same structure with 0 samples: the first dimension of each tensor is 0."""
    return _map(_without_samples, batch)


def size(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that is not a scalar."""
    return next((len(t) for t in tensors(batch) if t.dim()), 0)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the batch to a device; asynchronous for pinned tensors."""
    return map_tensors(lambda t: t.to(device, non_blocking=True), batch)


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf of a nested batch.

    A list of strings is a leaf: `default_collate` returns one string per sample.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {k: _map(function, v) for k, v in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [f.name for f in dataclasses.fields(batch) if f.init]
        return dataclasses.replace(batch, **{n: _map(function, getattr(batch, n)) for n in names})
    if isinstance(batch, tuple | list) and not _is_strings(batch):
        parts = [_map(function, v) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
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
