"""A task given as an object: what can be written down of it, and what only its process has."""

from __future__ import annotations

import enum
import inspect
import marshal
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """A task that config.toml can't make again, such as one with tensors in memory.

    The run is the object's; the fields below are what the run folder remembers of it. Made anew
    from them, in another process, it has no object and refuses to be trained.
    """

    path: str = ""
    """Module and class of the object."""
    holds: tuple[str, ...] = ()
    """NAME=VALUE of a dataclass's fields; of tensors and arrays the form, of other objects the
    class. Nothing of an object that is no dataclass: its attributes may move."""

    @classmethod
    def of(cls, task: Any) -> Given:
        """The object, with what can be said of it."""
        names = [f.name for f in fields(task)] if is_dataclass(task) else []
        told = tuple(f"{name}={_described(getattr(task, name))}" for name in names)
        made = cls(path=f"{type(task).__module__}:{type(task).__qualname__}", holds=told)
        object.__setattr__(made, "given", task)
        return made

    def model(self) -> Any:
        """As `Task.model`."""
        return self._object().model()

    def dataset(self, split: str) -> Any:
        """As `Task.dataset`."""
        return self._object().dataset(split)

    def loss(self, model: Any, batch: Any) -> Any:
        """As `Task.loss`."""
        return self._object().loss(model, batch)

    def __getattr__(self, name: str) -> Any:  # what else the object has
        if name.startswith("__") or "given" not in vars(self):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __str__(self) -> str:
        return self.path

    def _object(self) -> Any:
        if "given" not in vars(self):
            raise ConfigError(
                f"--task {self.path}: this run's task was given as an object, which only the "
                "process that made it has; go on there with trainer.train(), or put the class "
                "into a module, with fields that config.toml can hold.")
        return self.given


def code(task: Any) -> bytes:
    """The text of the file that a task is written in; of one from a notebook, its methods."""
    kind = type(getattr(task, "given", task))
    try:
        return Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):
        return b"".join(marshal.dumps(f.__code__) for f in vars(kind).values()
                        if inspect.isfunction(f))


def _described(value: Any) -> str:
    """Equal in each process that makes the same object: no addresses."""
    if value is None or isinstance(value, bool | int | float | str | enum.Enum | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_described, value)) + "]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        sizes = "x".join(map(str, value.shape))
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {sizes}".strip()
    return getattr(value, "__qualname__", None) or type(value).__qualname__
