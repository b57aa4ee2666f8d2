"""The model's buffers at a step boundary: a copy of them, and the memory that they have."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from operator import is_
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError


class Buffers:
    """A copy of the model's buffers (BatchNorm's statistics), taken at each step boundary.

    The forward moves them before it is known whether the step will count. Where it assigns them
    anew (`self.mean = …`), they are brought home: all others know them by their memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []
        self._homes: list[Tensor | None] = []
        self._names: list[str] = []
        self._persistent: list[bool] = []
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                self._places.append((module._buffers, name))
                self._homes.append(buffer)
                self._names.append(f"{path}.{name}" if path else name)
                self._persistent.append(name not in module._non_persistent_buffers_set)
        self._watched: list[tuple[str, dict[str, Any], str, Tensor]] = []
        self._rows: list[Tensor] = []
        """The watched ones where each has one dimension, so that they are joined as they are."""
        self._strayed = False
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._measure()

    def _measure(self) -> None:
        known = {id(b): kept for b, kept in self.pairs()}  # amid a step, of its beginning
        unlike = {id(b): b for b in self._homes if b is not None and b.numel()}
        self._live, self._kept = list(unlike.values()), [
            known[i] if i in known else b.detach().clone() for i, b in unlike.items()]

    @property
    def strayed(self) -> bool:
        """Whether the forward assigns some anew, so that amid a step other tensors stand in their
        places."""
        return self._strayed or any(
            owner.get(name) is not home
            for (owner, name), home in zip(self._places, self._homes, strict=True))

    def keep(self) -> None:
        """Remember the buffers as they are."""
        if self._live:
            torch._foreach_copy_(self._kept, self._live)

    def put_back(self) -> None:
        """Make the buffers what they were at `keep`."""
        for (owner, name), home in zip(self._places, self._homes, strict=True):
            if owner.get(name) is not home:
                self._strayed = True
                owner[name] = home
        if self._live:
            torch._foreach_copy_(self._live, self._kept)

    def bring_home(self) -> None:
        """Into their memory: those in whose places the forward has put other tensors.

        Raises:
            ConfigError: one has another form now, in which no restart could take it up.
        """
        standing = [owner.get(name) for owner, name in self._places]
        if all(map(is_, standing, self._homes)):
            return
        for place, (home, found) in enumerate(zip(self._homes, standing, strict=True)):
            if found is home:
                continue
            owner, name = self._places[place]
            self._strayed = True
            if home is not None and _fits(found, home):
                home.detach().copy_(found.detach())
                owner[name] = home
            elif self._persistent[place]:
                raise ConfigError(
                    f"--task: the model's forward makes its buffer {self._names[place]} "
                    f"{_form(found)}, and it was {_form(home)}: a restarted model, which has it as "
                    "model() makes it, couldn't take it up. Register it with its full size "
                    "(beside it, as another buffer, how much of it is in use), or with "
                    "persistent=False if it is a mere cache.")
            else:  # a cache that has grown
                self._homes[place] = found
                self._measure()

    @contextlib.contextmanager
    def untouched(self, moved: set[str]) -> Iterator[None]:
        """What is moved within is put back after it; `moved` is told the names of those that a
        checkpoint holds."""
        before = self._versions()
        try:
            yield
        finally:
            if (after := self._versions()) != before:
                moved |= {n for n, held, then, now in zip(
                    self._names, self._persistent, before, after, strict=True)
                    if held and then != now}
                self.put_back()

    def _versions(self) -> list[tuple[int, int]]:
        """Changes with each that is moved or assigned anew."""
        found = [owner.get(name) for owner, name in self._places]
        return [(id(b), 0 if b is None or b.is_inference() else b._version) for b in found]

    def watch(self, moved: Container[Tensor]) -> None:
        """From now on `spoilt` looks at those that some rank has moved since `keep`, and that were
        finite then: a mask of infinities stays out of it."""
        kept = {id(b): k for b, k in self.pairs()}
        self._watched = [
            (name, *place, home)
            for name, place, home in zip(self._names, self._places, self._homes, strict=True)
            if home is not None and home in moved and home.is_floating_point()
            and bool(torch.isfinite(kept[id(home)]).all())
        ]  # fmt: skip
        homes = [home for *_, home in self._watched]
        self._rows = homes if all(home.dim() == 1 for home in homes) else []

    def spoilt(self, among: Container[Tensor] | None = None) -> Tensor | None:
        """NaN if one of those (that are `among` these) isn't finite any more, which no loss in
        training tells, otherwise 0: on their device. None where there are none."""
        standing = [owner.get(key) for _, owner, key, _ in self._watched]
        if among is None and self._rows and all(map(is_, standing, self._rows)):
            found = self._rows
        else:
            found = [t.detach().flatten()
                     for t, (*_, home) in zip(self._standing(), self._watched, strict=True)
                     if among is None or home in among]
        return (torch.cat(found) * 0).sum() if found else None

    def spoilt_names(self) -> list[str]:
        """Those of them that aren't finite."""
        return [name for (name, *_), tensor in zip(self._watched, self._standing(), strict=True)
                if not bool(torch.isfinite(tensor).all())]

    def _standing(self) -> list[Tensor]:
        """The watched ones as they stand in their places; whatever else is there comes home."""
        found = [(owner.get(key), home) for _, owner, key, home in self._watched]
        return [t if isinstance(t, Tensor) and t.is_floating_point() else home for t, home in found]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each buffer with its copy."""
        return list(zip(self._live, self._kept, strict=True))


def _fits(found: Any, home: Tensor) -> TypeGuard[Tensor]:
    return isinstance(found, Tensor) and (
        found.shape == home.shape and found.dtype == home.dtype and found.device == home.device)


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return "None" if value is None else type(value).__name__
