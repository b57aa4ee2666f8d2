"""A leaf of the configuration: its default, how it may change on resume, and its check."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from trainer.errors import ConfigError

OnOff = Literal["on", "off"]
Change = Literal["refused", "announced", "free"]


def leaf(default: Any, change: Change) -> Any:
    """A configuration field with its default and how it may change on resume."""
    return dataclasses.field(default=default, metadata={"change": change})


def check(condition: bool, flag: str, value: object, remedy: str) -> None:
    """Raises `ConfigError`, with flag, value and remedy, unless the condition holds."""
    if not condition:
        raise ConfigError(f"--{flag} {value if str(value).strip() else repr(value)}: {remedy}")
