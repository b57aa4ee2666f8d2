"""Tasks passed as objects to `trainer.train()`, and their description in the run folder."""

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
    """A task that can't be recreated from config.toml, such as one with tensors in memory.

    It delegates to the object. The fields are saved in the run folder; an instance created from
    them in another process has no object and can't be trained.
    """

    path: str = ""
    """Module and class of the object."""
    holds: tuple[str, ...] = ()
    """NAME=VALUE of a dataclass's fields: dtype and shape of tensors and arrays, the class of
    other objects. Empty if the object is no dataclass, because its attributes may change."""

    @classmethod
    def of(cls, task: Any) -> Given:
        """Wrap an object and describe it."""
        names = [f.name for f in fields(task)] if is_dataclass(task) else []
        described = tuple(f"{name}={_described(getattr(task, name))}" for name in names)
        wrapped = cls(path=f"{type(task).__module__}:{type(task).__qualname__}", holds=described)
        object.__setattr__(wrapped, "given", task)
        return wrapped

    def model(self) -> Any:
        """As `Task.model`."""
        return self._object().model()

    def dataset(self, split: str) -> Any:
        """As `Task.dataset`."""
        return self._object().dataset(split)

    def loss(self, model: Any, batch: Any) -> Any:
        """As `Task.loss`."""
        return self._object().loss(model, batch)

    def __getattr__(self, name: str) -> Any:  # the object's other attributes
        if name.startswith("__") or "given" not in vars(self):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __str__(self) -> str:
        return self.path

    def _object(self) -> Any:
        if "given" not in vars(self):
            raise ConfigError(
                f"--task {self.path}: this run's task was passed as an object, which exists only "
                "in the process that created it; continue there with trainer.train(), or move the "
                "class to a module and use fields that config.toml can hold.")
        return self.given


def code(task: Any) -> bytes:
    """Source file of a task's class; for a class from a notebook, the bytecode of its methods."""
    kind = type(getattr(task, "given", task))
    try:
        return Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):
        return b"".join(marshal.dumps(f.__code__) for f in vars(kind).values()
                        if inspect.isfunction(f))


def _described(value: Any) -> str:
    """Describe a value without addresses: equal in each process that creates the same object."""
    if value is None or isinstance(value, bool | int | float | str | enum.Enum | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_described, value)) + "]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        sizes = "x".join(map(str, value.shape))
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {sizes}".strip()
    return getattr(value, "__qualname__", None) or type(value).__qualname__
