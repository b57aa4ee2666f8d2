"""Settings: conversion to their types, allowed ranges, and how they may change on resume."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import numbers
import operator
import os
import re
import types
import typing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal

from trainer.errors import ConfigError

Unit = Literal["steps", "epochs", "percent"]
OnOff = Literal["on", "off"]
Change = Literal["fixed", "must_match", "may_change", "ignored"]
"""On resume: a change is an error, an error unless accepted, is reported, or has no influence."""


@functools.cache
def type_hints(cls: Any) -> dict[str, Any]:
    """The types of a class's fields."""
    return typing.get_type_hints(cls)


@dataclass(frozen=True)
class Duration:
    """A duration of training: `200` steps, `1ep` epochs, `5%` of the run, or `off`."""

    value: float
    unit: Unit = "steps"

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse `200`, `1ep`, `0.5ep`, `5%` or `off`."""
        if text.strip() == "off":
            return cls(0.0)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ep|%|)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a length; write 200 (steps), 1ep (epochs), "
                             "5% (of the run) or off")
        value, mark = float(match[1]), match[2]
        if not mark and not value.is_integer():
            part = f"; {100 * value:g} % of the run is written {100 * value:g}%" * (value < 1)
            raise ValueError(f"{text!r} is not a whole number of steps{part}")
        if mark == "%" and value > 100:
            raise ValueError(f"{text!r} is more than the whole run")
        units: dict[str, Unit] = {"": "steps", "ep": "epochs", "%": "percent"}
        return cls(value, units[mark])

    def __str__(self) -> str:
        if self.value == 0:
            return "off"
        number = format(Decimal(repr(self.value)).normalize(), "f")  # all digits, no exponent
        return number + {"steps": "", "epochs": "ep", "percent": "%"}[self.unit]

    def steps(self, *, epoch: int, total: int) -> int:
        """The number of optimizer steps, at least 1 (0 for `off`), from those of epoch and run."""
        if self.value == 0:
            return 0
        whole = {"steps": 1.0, "epochs": float(epoch), "percent": total / 100}[self.unit]
        return max(1, round(self.value * whole))


def setting(default: Any, change: Change, allowed: str = "", *, repeatable: bool = False) -> Any:
    """A field of a section: how it may `change` on resume, the range of a number (`allowed`), such
    as ">= 0 and < 1", and whether each use of the flag adds one value to those of the recipe."""
    return dataclasses.field(default=default, metadata={
        "change": change, "allowed": allowed, "repeatable": repeatable})


def init_fields(part: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that are settings."""
    return [field for field in dataclasses.fields(part) if field.init]


def setting_name(field: dataclasses.Field[Any]) -> str:
    """The name of a field in config.toml; its own name may be taken by a method."""
    return str(field.metadata.get("flag", field.name))


class InvalidSetting(ConfigError):
    """A value that a setting, given by its dotted name, can't have."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        shown = value if str(value).strip() else repr(value)
        super().__init__(f"{flag_of(name)} {shown}: {remedy}")
        self.name = name


class Section:
    """Base class of configuration sections and shipped tasks: converts the values to the types of
    their fields and checks the ranges. Without it, `True` for an on/off setting would be "off"."""

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        super().__init_subclass__()
        cls.prefix = prefix

    def __post_init__(self) -> None:
        own: Any = type(self)
        hints = type_hints(own)
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            given, hint = getattr(self, field.name), hints[field.name]
            try:
                value = convert_value(hint, given)
            except ValueError as error:
                raise InvalidSetting(self._flag(field.name), repr(given), f"{error}.") from error
            allowed = field.metadata.get("allowed", "")
            self.check(fits(value, allowed), field.name, f"use {type_name(hint)} {allowed}.")
            object.__setattr__(self, field.name, value)

    def check(self, condition: bool, name: str, remedy: str, value: object = None) -> None:
        """Raise `InvalidSetting` unless the condition holds, with the (part of the) value."""
        if not condition:
            wrong = getattr(self, name) if value is None else value
            raise InvalidSetting(self._flag(name), wrong, remedy)

    def _flag(self, name: str) -> str:
        fields: Any = type(self).__dataclass_fields__  # type: ignore[attr-defined]
        return self.prefix + setting_name(fields[name])


def flag_of(name: str) -> str:
    """The flag of a setting. That of `run` is --run-dir: torchrun takes --run for --run-path."""
    return "--" + ("run-dir" if name == "run" else name.replace("_", "-"))


def fits(value: Any, allowed: str) -> bool:
    """Whether a number, or each number of a tuple, is in a range such as ">= 0 and < 1"."""
    signs = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
    bounds = [bound.split() for bound in allowed.split(" and ") if bound]
    several = value if isinstance(value, tuple) else (value,)
    return all(signs[sign](number, float(limit)) for sign, limit in bounds
               for number in several if isinstance(number, int | float))


SEVERAL = (tuple, list, set, frozenset)


def convert_value(hint: Any, value: Any, *, text: bool = False) -> Any:
    """Convert a value to a type; a ValueError says what is expected.

    Args:
        text: whether the value is a word of a command line (a list of words for a type of several
            values) and not from TOML or Python.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, typing.TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        if text and types.NoneType in inner and value in ("None", ["None"]):
            return None
        kinds = [kind for kind in inner if kind is not types.NoneType]
        if len(kinds) == 1 and value is not None:
            return convert_value(kinds[0], value, text=text)
        for choice in sorted(inner, key=lambda kind: kind is str):  # any text is a str
            with contextlib.suppress(ValueError):
                return convert_value(choice, value, text=text)
    elif origin is Literal:
        for choice in inner:
            if value == (str(choice) if text else choice) and not isinstance(value, bool):
                return choice
    elif hint in SEVERAL or origin in SEVERAL:
        if isinstance(value, SEVERAL):
            kinds = _kinds(hint, len(value))
            return (origin or hint)(
                convert_value(kind, v, text=text) for kind, v in zip(kinds, value, strict=True))
    elif origin is dict:
        if text and len(value) % 2:
            raise ValueError("expected keys and values in turn, separated by blanks: KEY VALUE")
        if text:
            value = dict(zip(value[::2], value[1::2], strict=True))
        if isinstance(value, dict):
            return {convert_value(inner[0], k, text=text): convert_value(inner[1], v, text=text)
                    for k, v in value.items()}
    elif hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        if text:
            with contextlib.suppress(ValueError):
                return hint(value)
        elif isinstance(value, kind) and not isinstance(value, bool):
            return hint(value)
    elif hint in (str, Path):
        if isinstance(value, str | os.PathLike):
            return hint(value)
    elif hint is Duration and isinstance(value, int | str) and not isinstance(value, bool):
        return Duration.parse(str(value))
    elif text and hint is bool:
        if value.lower() in ("on", "true", "off", "false"):
            return value.lower() in ("on", "true")
    elif isinstance(hint, enum.EnumMeta) and isinstance(value, str) and value in hint.__members__:
        return hint[value]
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    near = difflib.get_close_matches(str(value), map(str, inner), n=1) if origin is Literal else []
    raise ValueError(f"expected {type_name(hint)}" + "".join(f" (did you mean {n}?)" for n in near))


def _kinds(hint: Any, count: int) -> list[Any]:
    """The type of each of `count` values of a collection."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and Ellipsis not in inner:
        if count != len(inner):
            raise ValueError(f"expected {len(inner)} values, separated by blanks")
        return list(inner)
    return [inner[0] if inner else Any] * count


def type_name(hint: Any) -> str:
    """A type in the help text and in messages: INT, auto|INT, on|off, FLOAT FLOAT, STR …."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = sorted(inner, key=lambda kind: typing.get_origin(kind) is not Literal)
        return "|".join(type_name(kind) for kind in kinds if kind is not types.NoneType)
    if origin is Literal:
        return "|".join(map(str, inner))
    if isinstance(hint, enum.EnumMeta):
        return "|".join(hint.__members__)
    if origin in (*SEVERAL, dict):
        return " ".join(map(type_name, inner)) + " …" * (origin is not tuple and origin is not dict)
    names = {int: "INT", float: "FLOAT", str: "STR", bool: "on|off", Path: "PATH",
             Duration: "LENGTH", Ellipsis: "…"}
    return names.get(hint) or str(getattr(hint, "__name__", hint))
