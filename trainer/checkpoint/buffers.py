"""Copies of the model's buffers at a step boundary."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.distributed.torch_private import buffer_slots, version
from trainer.errors import ConfigError


class Buffers:
    """Copies of the model's buffers (BatchNorm statistics), updated at each step boundary.

    Tensors that the forward assigns to buffers (`self.mean = …`) are copied back to the original
    storage, to which all other parts of a run refer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []  # dict and key of each buffer
        self._originals: list[Tensor | None] = []  # its tensor with the original storage
        self._names: list[str] = []
        self._persistent: list[bool] = []
        for path, module in model.named_modules():
            for owner, name, persistent in buffer_slots(module):
                self._slots.append((owner, name))
                self._originals.append(owner[name])
                self._names.append(f"{path}.{name}" if path else name)
                self._persistent.append(persistent)
        self._watched: list[tuple[str, dict[str, Any], str, Tensor]] = []
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
        """Whether the forward assigns new tensors to buffers: within a step the originals are old.
        """
        return self._was_reassigned or any(
            owner.get(name) is not original
            for (owner, name), original in zip(self._slots, self._originals, strict=True))

    def keep(self) -> None:
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
        for index, ((owner, name), original) in enumerate(
                zip(self._slots, self._originals, strict=True)):
            found = owner.get(name)
            if found is original:
                continue
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
        """Restore buffers that change inside the context; `moved` receives the names of those that
        are persistent."""
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
        return [(id(b), 0 if b is None or b.is_inference() else version(b)) for b in current]

    def watch(self, moved: Container[Tensor]) -> None:
        """Let `nonfinite` check the buffers in `moved` that were finite at `keep`."""
        kept = {id(b): k for b, k in self.pairs()}
        self._watched = [
            (name, *slot, original)
            for name, slot, original in zip(self._names, self._slots, self._originals, strict=True)
            if original is not None and original in moved and original.is_floating_point()
            and bool(torch.isfinite(kept[id(original)]).all())
        ]  # fmt: skip

    def nonfinite(self, among: Container[Tensor] | None = None) -> Tensor | None:
        """NaN if a watched buffer (in `among`) is not finite, otherwise 0, on the buffers' device;
        None if no buffer is watched."""
        found = [tensor.detach().flatten() for _, original, tensor in self._current()
                 if among is None or original in among]
        return (torch.cat(found) * 0).sum() if found else None

    def nonfinite_names(self) -> list[str]:
        """Names of the watched buffers that are not finite."""
        return [name for name, _, tensor in self._current()
                if not bool(torch.isfinite(tensor).all())]

    def _current(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, original, current tensor) of each watched buffer."""
        for name, owner, key, original in self._watched:
            tensor = owner.get(key)
            if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
                tensor = original
            yield name, original, tensor

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
