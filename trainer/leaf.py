"""A leaf of the configuration: its default, how it may change on resume, and its check."""

from __future__ import annotations

import dataclasses
import numbers
import os
import typing
from typing import Any, Literal

import tyro

from trainer.errors import ConfigError
from trainer.length import Length

OnOff = Literal["on", "off"]
Texts = tyro.conf.UseAppendAction[tuple[str, ...]]
"""Of a flag that may repeat: each adds to those of the recipe."""
Change = Literal["refused", "announced", "free"]


def leaf(default: Any, change: Change) -> Any:
    """A configuration field with its default and how it may change on resume."""
    return dataclasses.field(default=default, metadata={"change": change})


def check(condition: bool, flag: str, value: object, remedy: str) -> None:
    """Raises `ConfigError`, with flag, value and remedy, unless the condition holds."""
    if not condition:
        raise ConfigError(f"--{flag} {value if str(value).strip() else repr(value)}: {remedy}")


class Typed:
    """A part of the configuration that refuses values of other types than are declared, before its
    own check compares them: from Python, `True` isn't "on", and would be taken for "off"."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")

        def __post_init__(self: Any) -> None:
            hints = typing.get_type_hints(type(self))
            for field in dataclasses.fields(self):
                if wanted := unfit(getattr(self, field.name), hints[field.name]):
                    raise ConfigError(f"{type(self).__name__}({field.name}="
                                      f"{getattr(self, field.name)!r}): {wanted} is wanted.")
            if own is not None:
                own(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]


def unfit(value: Any, hint: Any) -> str:
    """What is wanted in place of a value that isn't of a declared type; empty where it is."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "" if isinstance(value, str) and value in inner else " or ".join(map(repr, inner))
    if origin is tuple:
        many = inner[-1] is Ellipsis
        fits = isinstance(value, tuple | list) and (many or len(value) == len(inner)) and not any(
            unfit(v, inner[0]) for v in value)
        texts = "a tuple of texts, such as ('body.*',)," if inner[0] is str else ""
        return "" if fits else texts or f"a tuple of {len(inner)} numbers"
    if inner:
        told = [unfit(value, kind) for kind in inner if kind is not type(None)]
        may_be_none = value is None and type(None) in inner
        return "" if may_be_none or not all(told) else " or ".join(told)
    if hint is Length:
        return "" if isinstance(value, Length) else (
            f"a trainer.length.Length, such as Length.parse({str(value)!r}),")
    kinds: dict[Any, tuple[Any, str]] = {
        int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number"),
        str: (str | os.PathLike, "a text")}
    if hint in kinds:
        kind, wanted = kinds[hint]
        return "" if isinstance(value, kind) and not isinstance(value, bool) else wanted
    if dataclasses.is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        return "" if isinstance(value, typing.cast(type, hint)) else f"a trainer.config.{name}(…)"
    return ""
