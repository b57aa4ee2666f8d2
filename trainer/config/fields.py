"""Settings of the configuration: default, how they may change on resume, type check."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
import typing
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import tyro

from trainer.errors import ConfigError

Unit = Literal["steps", "epochs", "percent"]


@dataclass(frozen=True)
class Duration:
    """A duration of training: `200` steps, `1ep` epochs, `5%` of the run, or `off`."""

    value: float
    unit: Unit = "steps"

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse `200`, `1ep`, `0.5ep`, `5%` or `off`.

        Raises:
            ValueError: the text is none of these; names the allowed forms.
        """
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
        """The number of optimizer steps; at least 1, or 0 for `off`.

        Args:
            epoch: steps of an epoch.
            total: steps of the run.
        """
        if self.value == 0:
            return 0
        whole = {"steps": 1.0, "epochs": float(epoch), "percent": total / 100}[self.unit]
        return max(1, round(self.value * whole))


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


def check_value(condition: bool, flag: str, value: object, remedy: str) -> None:
    """Raise `ConfigError` with flag, value and remedy unless the condition holds."""
    if not condition:
        raise ConfigError(f"--{flag} {value if str(value).strip() else repr(value)}: {remedy}")


class CheckedSection:
    """Base class of configuration sections; checks the types of all values before `__post_init__`.

    Without this check, `True` given from Python for an on/off setting would count as "off".
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = cls.__dict__.get("__post_init__")

        def __post_init__(self: Any) -> None:
            hints = typing.get_type_hints(type(self))
            for field in dataclasses.fields(self):
                if wanted := expected_type(getattr(self, field.name), hints[field.name]):
                    raise ConfigError(f"{type(self).__name__}({field.name}="
                                      f"{getattr(self, field.name)!r}): expected {wanted}.")
            if own is not None:
                own(self)

        cls.__post_init__ = __post_init__  # type: ignore[attr-defined]


def expected_type(value: Any, hint: Any) -> str:
    """The expected type in words if a value doesn't have it; "" if it does."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "" if isinstance(value, str) and value in inner else " or ".join(map(repr, inner))
    if origin is tuple:
        many = inner[-1] is Ellipsis
        fits = isinstance(value, tuple | list) and (many or len(value) == len(inner)) and not any(
            expected_type(v, inner[0]) for v in value)
        strings = "a tuple of strings, such as ('body.*',)" if inner[0] is str else ""
        return "" if fits else strings or f"a tuple of {len(inner)} numbers"
    if inner:
        problems = [expected_type(value, kind) for kind in inner if kind is not type(None)]
        may_be_none = value is None and type(None) in inner
        return "" if may_be_none or not all(problems) else " or ".join(problems)
    if hint is Duration:
        return "" if isinstance(value, Duration) else (
            f"a trainer.config.fields.Duration, such as Duration.parse({str(value)!r})")
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
