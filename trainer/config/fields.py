"""Settings of the configuration: default, how they may change on resume, type check."""

from __future__ import annotations

import dataclasses
import numbers
import os
import typing
from typing import Annotated, Any, Literal

import tyro

from trainer.config.length import Length
from trainer.errors import ConfigError

OnOff = Literal["on", "off"]
Texts = tyro.conf.UseAppendAction[tuple[str, ...]]
"""Values of a flag that may be repeated; they are added to those of the recipe."""
RunDir = Annotated[str | None, tyro.conf.arg(name="run-dir")]
"""The run folder. Its flag is --run-dir, since torchrun takes --run for its own --run-path."""
Change = Literal["must_match", "may_change", "ignored"]
"""On resume: a change is an error, is reported, or has no influence on the result."""


def setting(default: Any, change: Change) -> Any:
    """A dataclass field with a default and the way it may change on resume."""
    return dataclasses.field(default=default, metadata={"change": change})


def check(condition: bool, flag: str, value: object, remedy: str) -> None:
    """Raise `ConfigError` with flag, value and remedy unless the condition holds."""
    if not condition:
        raise ConfigError(f"--{flag} {value if str(value).strip() else repr(value)}: {remedy}")


class Typed:
    """Base class of configuration sections; checks the types of all values before `__post_init__`.

    Without this check, `True` given from Python for an on/off setting would count as "off".
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")

        def __post_init__(self: Any) -> None:
            hints = typing.get_type_hints(type(self))
            for field in dataclasses.fields(self):
                if wanted := unfit(getattr(self, field.name), hints[field.name]):
                    raise ConfigError(f"{type(self).__name__}({field.name}="
                                      f"{getattr(self, field.name)!r}): expected {wanted}.")
            if own is not None:
                own(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]


def unfit(value: Any, hint: Any) -> str:
    """The expected type in words if a value doesn't have it; "" if it does."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "" if isinstance(value, str) and value in inner else " or ".join(map(repr, inner))
    if origin is tuple:
        many = inner[-1] is Ellipsis
        fits = isinstance(value, tuple | list) and (many or len(value) == len(inner)) and not any(
            unfit(v, inner[0]) for v in value)
        strings = "a tuple of strings, such as ('body.*',)" if inner[0] is str else ""
        return "" if fits else strings or f"a tuple of {len(inner)} numbers"
    if inner:
        problems = [unfit(value, kind) for kind in inner if kind is not type(None)]
        may_be_none = value is None and type(None) in inner
        return "" if may_be_none or not all(problems) else " or ".join(problems)
    if hint is Length:
        return "" if isinstance(value, Length) else (
            f"a trainer.config.length.Length, such as Length.parse({str(value)!r})")
    kinds: dict[Any, tuple[Any, str]] = {
        int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number"),
        str: (str | os.PathLike, "a string")}
    if hint in kinds:
        kind, wanted = kinds[hint]
        return "" if isinstance(value, kind) and not isinstance(value, bool) else wanted
    if dataclasses.is_dataclass(hint):
        name = getattr(hint, "__name__", "")
        return "" if isinstance(value,
                                typing.cast(type, hint)) else f"a trainer.config.schema.{name}(…)"
    return ""
