"""The model's buffers at a step boundary: a copy of them, and the memory that they have."""

from __future__ import annotations

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
        for place, home in enumerate(self._homes):
            owner, name = self._places[place]
            if (found := owner.get(name)) is home:
                continue
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
