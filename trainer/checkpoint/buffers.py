"""Copies of the model's buffers at a step boundary."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.distributed.torch_private import buffer_slots, version
from trainer.errors import ConfigError


@dataclass
class _Slot:
    """The place of a buffer in its module."""

    owner: dict[str, Any]
    key: str
    name: str
    is_persistent: bool
    original: Tensor | None
    """The tensor with the original storage."""

    @property
    def current(self) -> Any:
        return self.owner.get(self.key)


class Buffers:
    """Copies of the model's buffers (BatchNorm statistics), updated at each step boundary.

    Tensors that the forward assigns to buffers (`self.mean = …`) are copied back to the original
    storage, to which all other parts of a run refer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            _Slot(owner, key, f"{path}.{key}".removeprefix("."), persistent, owner[key])
            for path, module in model.named_modules()
            for owner, key, persistent in buffer_slots(module)]
        self._watched: list[_Slot] = []
        self._was_reassigned = False
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._allocate_copies()

    def _allocate_copies(self) -> None:
        known = {id(b): kept for b, kept in self.pairs()}  # within a step, from its beginning
        originals = [slot.original for slot in self._slots]
        distinct = {id(b): b for b in originals if b is not None and b.numel()}
        self._live, self._kept = list(distinct.values()), [
            known[i] if i in known else b.detach().clone() for i, b in distinct.items()]

    @property
    def was_reassigned(self) -> bool:
        """Whether the forward assigns new tensors to buffers: within a step the originals are old.
        """
        return self._was_reassigned or any(s.current is not s.original for s in self._slots)

    def keep(self) -> None:
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    def put_back(self) -> None:
        """Restore the buffers to their values at `keep`."""
        for slot in self._slots:
            if slot.current is not slot.original:
                self._was_reassigned = True
                slot.owner[slot.key] = slot.original
        if self._live:
            torch._foreach_copy_(self._live, self._kept)

    def restore_storage(self) -> None:
        """Copy tensors that the forward has assigned to buffers back to the original storage.
        Raises ConfigError if a persistent buffer has changed its shape, dtype or device."""
        for slot in self._slots:
            found, original = slot.current, slot.original
            if found is original:
                continue
            self._was_reassigned = True
            if original is not None and _fits(found, original):
                original.detach().copy_(found.detach())
                slot.owner[slot.key] = original
            elif slot.is_persistent:
                raise ConfigError(
                    f"--task: the model's forward changes its buffer {slot.name} from "
                    f"{_form(original)} to {_form(found)}; a restarted model has the buffer of "
                    "model() and could not load it. Register it with its full size (and a second "
                    "buffer with the size in use), or with persistent=False if it is only a cache.")
            else:  # a cache that has grown
                slot.original = found
                self._allocate_copies()

    @contextlib.contextmanager
    def preserved(self, moved: set[str]) -> Iterator[None]:
        """Restore buffers that change inside the context; `moved` receives the names of those that
        are persistent."""
        before = self._versions()
        try:
            yield
        finally:
            if (after := self._versions()) != before:
                moved |= {s.name for s, old, new in zip(self._slots, before, after, strict=True)
                          if s.is_persistent and old != new}
                self.put_back()

    def _versions(self) -> list[tuple[int, int]]:
        """A value for each buffer that differs after a change or an assignment."""
        current = [slot.current for slot in self._slots]
        return [(id(b), 0 if b is None or b.is_inference() else version(b)) for b in current]

    def watch(self, moved: Container[Tensor]) -> None:
        """Let `nonfinite` check the buffers in `moved` that were finite at `keep`."""
        kept = {id(b): k for b, k in self.pairs()}
        self._watched = [slot for slot in self._slots if (b := slot.original) is not None
                         and b in moved and b.is_floating_point()
                         and bool(torch.isfinite(kept[id(b)]).all())]

    def nonfinite(self, among: Container[Tensor] | None = None) -> Tensor | None:
        """NaN if a watched buffer (in `among`) is not finite, otherwise 0, on the buffers' device;
        None if no buffer is watched."""
        found = [slot.current.detach().flatten() for slot in self._watched
                 if among is None or slot.original in among]
        return (torch.cat(found) * 0).sum() if found else None

    def nonfinite_names(self) -> list[str]:
        """Names of the watched buffers that are not finite."""
        return [s.name for s in self._watched if not bool(torch.isfinite(s.current).all())]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(buffer, copy) of each buffer."""
        return list(zip(self._live, self._kept, strict=True))


def _fits(found: Any, original: Tensor) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and (
        found.shape == original.shape and found.dtype == original.dtype
        and found.device == original.device)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
