"""Records of a run folder: JSON objects of a known kind, which anybody may have written.

A reader names the entries that it uses and what each has to be. What doesn't fit is `FileDamaged`,
or a line that is left out, before any code sees it.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import FileDamaged
from trainer.storage.files import display_path, read_file, read_text

Check = Callable[[Any], bool]

LARGEST_INT = 1 << 53
"""Integers are smaller: a float holds them exactly."""
LATEST_S = 1e11
"""Largest number of seconds, also since the epoch: the year 5138."""
DEEPEST = 64
"""Most lists and objects inside each other."""


def anything(_: Any) -> bool:
    return True


def is_text(value: Any) -> bool:
    return type(value) is str


def is_name(value: Any) -> bool:
    """The name of a file in a folder."""
    return (is_text(value) and value not in ("", "..") and Path(value).name == value
            and value.isprintable())


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    if type(value) is int:
        return -LARGEST_INT < value < LARGEST_INT
    return type(value) is float and math.isfinite(value)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_INT


def is_positive(value: Any) -> bool:
    return is_count(value) and value > 0


def is_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LATEST_S


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check, *, least: int = 0) -> Check:
    return lambda value: (type(value) is list and len(value) >= least
                          and all(map(check, value)))


def table_of(check: Check = anything) -> Check:
    """An object with any names."""
    return lambda value: type(value) is dict and all(map(check, value.values()))


@dataclass(frozen=True)
class Kind:
    """What the entries of an object have to be, by name; a check itself."""

    needed: Mapping[str, Check] = field(default_factory=dict)
    known: Mapping[str, Check] = field(default_factory=dict)
    """Entries that may be missing."""
    others: Check = anything
    whole: Check = anything
    """What its entries have to be together."""

    def __call__(self, value: Any) -> bool:
        return not self.problem(value)

    def problem(self, value: Any) -> str:
        """What is wrong with a value, or ""."""
        if type(value) is not dict:
            return "it is no JSON object"
        for name in self.needed:
            if name not in value:
                return f"it has no entry {name!r}"
        for name, entry in value.items():
            check = self.needed.get(name) or self.known.get(name) or self.others
            if isinstance(check, Kind):
                if why := check.problem(entry):
                    return f"{name}: {why}"
            elif not check(entry):
                shown = json.dumps(entry)
                return f"{name} is {shown if len(shown) <= 40 else shown[:37] + '...'}"
        return "" if self.whole(value) else "its entries don't fit together"


OBJECT = Kind()


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """As `json.loads`, but a ValueError too for a name twice in an object, more than `DEEPEST`
    levels, and bytes that are not UTF-8 or begin with a byte order mark."""
    text = data if isinstance(data, str) else data.decode()
    try:
        value = _decoder(**hooks).decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError("it is nested too deeply")
    return value


def read_record(path: Path, kind: Kind = OBJECT) -> dict[str, Any] | None:
    """Read a JSON object; None without a file. Raises FileDamaged if it isn't one of its kind."""
    try:
        data = read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = parse_json(data)
    except ValueError as error:
        raise FileDamaged(f"{display_path(path)}: it can't be read as JSON: {error}") from error
    if why := kind.problem(value):
        raise FileDamaged(f"{display_path(path)}: {why}")
    found: dict[str, Any] = value
    return found


def read_json(
    path: Path, kind: Kind = OBJECT, tell: Callable[[str], object] = len
) -> dict[str, Any] | None:
    """As `read_record`, but None for a damaged file too, after a call of `tell` with the reason."""
    try:
        return read_record(path, kind)
    except FileDamaged as error:
        tell(str(error))
        return None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises OSError, or FileDamaged if it can't be parsed."""
    text = read_text(path)
    try:
        table = tomllib.loads(text)
        if _is_deep(table):
            raise RecursionError
    except RecursionError:
        raise FileDamaged(f"{display_path(path)}: it is nested too deeply") from None
    except ValueError as error:
        raise FileDamaged(f"{display_path(path)}: {error}") from error
    return table


@functools.cache
def _decoder(**hooks: Any) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_with_each_name_once, **hooks)


def _with_each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for part in level if isinstance(part, dict | list)
                 for inner in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return False
    return True
