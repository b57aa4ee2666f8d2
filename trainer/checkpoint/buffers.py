"""Copies of the model's buffers at a step boundary."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.distributed import torch_private
from trainer.errors import ConfigError


class Buffers:
    """Copies of the model's buffers (BatchNorm statistics), updated at each step boundary.

    If the forward assigns new tensors to buffers (`self.mean = …`), their values are copied back to
    the original storage, to which all other parts of a run refer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        """Dict and key of each buffer in its module."""
        self._originals: list[Tensor | None] = []
        """Tensor of each buffer with the original storage."""
        self._names: list[str] = []
        self._persistent: list[bool] = []
        for path, module in model.named_modules():
            for owner, name, persistent in torch_private.buffer_slots(module):
                self._slots.append((owner, name))
                self._originals.append(owner[name])
                self._names.append(f"{path}.{name}" if path else name)
                self._persistent.append(persistent)
        self._watched: list[tuple[str, dict[str, Any], str, Tensor]] = []
        self._vectors: list[Tensor] = []
        """The watched buffers if all have one dimension: `torch.cat` then needs no flattening."""
        self._was_reassigned = False
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._allocate_copies()

    def _allocate_copies(self) -> None:
        known = {id(b): kept for b, kept in self.pairs()}  # within a step, from its beginning
        distinct = {id(b): b for b in self._originals if b is not None and b.numel()}
        self._live, self._kept = list(distinct.values()), [
            known[i] if i in known else b.detach().clone() for i, b in distinct.items()]

    @property
    def was_reassigned(self) -> bool:
        """Whether the forward assigns new tensors to buffers: within a step the originals may be
        out of date."""
        return self._was_reassigned or any(
            owner.get(name) is not original
            for (owner, name), original in zip(self._slots, self._originals, strict=True))

    def keep(self) -> None:
        """Copy the current buffers."""
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    def put_back(self) -> None:
        """Restore the buffers to their values at `keep`."""
        for (owner, name), original in zip(self._slots, self._originals, strict=True):
            if owner.get(name) is not original:
                self._was_reassigned = True
                owner[name] = original
        if self._live:
            torch._foreach_copy_(self._live, self._kept)

    def restore_storage(self) -> None:
        """Copy tensors that the forward has assigned to buffers back to the original storage.

        Raises:
            ConfigError: a persistent buffer has changed its shape, dtype or device, so a restarted
                model could not load it.
        """
        current = [owner.get(name) for owner, name in self._slots]
        if all(map(is_, current, self._originals)):
            return
        for index, (original, found) in enumerate(zip(self._originals, current, strict=True)):
            if found is original:
                continue
            owner, name = self._slots[index]
            self._was_reassigned = True
            if original is not None and _fits(found, original):
                original.detach().copy_(found.detach())
                owner[name] = original
            elif self._persistent[index]:
                raise ConfigError(
                    f"--task: the model's forward changes its buffer {self._names[index]} from "
                    f"{_form(original)} to {_form(found)}; a restarted model has the buffer of "
                    "model() and could not load it. Register it with its full size (and a second "
                    "buffer with the size in use), or with persistent=False if it is only a cache.")
            else:  # a cache that has grown
                self._originals[index] = found
                self._allocate_copies()

    @contextlib.contextmanager
    def preserved(self, moved: set[str]) -> Iterator[None]:
        """Restore buffers that change inside the context.

        Args:
            moved: receives the names of changed persistent buffers.
        """
        before = self._versions()
        try:
            yield
        finally:
            if (after := self._versions()) != before:
                versions = zip(self._names, self._persistent, before, after, strict=True)
                moved |= {n for n, persistent, old, new in versions if persistent and old != new}
                self.put_back()

    def _versions(self) -> list[tuple[int, int]]:
        """A value for each buffer that differs after a change or an assignment."""
        current = [owner.get(name) for owner, name in self._slots]
        return [(id(b), 0 if b is None or b.is_inference() else b._version) for b in current]

    def watch(self, moved: Container[Tensor]) -> None:
        """Let `nonfinite` check the buffers in `moved` that were finite at `keep`."""
        kept = {id(b): k for b, k in self.pairs()}
        self._watched = [
            (name, *slot, original)
            for name, slot, original in zip(
                self._names, self._slots, self._originals, strict=True)
            if original is not None and original in moved and original.is_floating_point()
            and bool(torch.isfinite(kept[id(original)]).all())
        ]  # fmt: skip
        originals = [original for *_, original in self._watched]
        self._vectors = originals if all(b.dim() == 1 for b in originals) else []

    def nonfinite(self, among: Container[Tensor] | None = None) -> Tensor | None:
        """NaN if a watched buffer (in `among`) is not finite, otherwise 0, on the buffers' device.

        Returns:
            None if no buffer is watched.
        """
        current = [owner.get(key) for _, owner, key, _ in self._watched]
        if among is None and self._vectors and all(map(is_, current, self._vectors)):
            found = self._vectors
        else:
            found = [t.detach().flatten()
                     for t, (*_, original) in zip(self._current(), self._watched, strict=True)
                     if among is None or original in among]
        return (torch.cat(found) * 0).sum() if found else None

    def nonfinite_names(self) -> list[str]:
        """Names of the watched buffers that are not finite."""
        return [name for (name, *_), tensor in zip(self._watched, self._current(), strict=True)
                if not bool(torch.isfinite(tensor).all())]

    def _current(self) -> list[Tensor]:
        """Current tensors of the watched buffers; the original if another value is assigned."""
        found = [(owner.get(key), original) for _, owner, key, original in self._watched]
        return [t if isinstance(t, Tensor) and t.is_floating_point() else original
                for t, original in found]

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
