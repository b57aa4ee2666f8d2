"""Tasks with fields of many types, some of which a TOML file can't hold."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

from tape_task import Tape


class Norm(enum.Enum):
    BATCH = 1
    LAYER = 2


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float | None = 0.5


@dataclasses.dataclass(frozen=True)
class Fields(Tape):
    width: int | None = 5  # type: ignore[assignment]
    depth: int | None = None
    norm: Norm = Norm.BATCH  # type: ignore[assignment]
    sizes: set[int] = dataclasses.field(default_factory=lambda: {2, 1})
    names: frozenset[str] = frozenset()
    places: tuple[Path, ...] = (Path("here"),)
    weights: dict[str, float] = dataclasses.field(default_factory=lambda: {"a": 1.0})
    inner: Inner = Inner()


@dataclasses.dataclass(frozen=True)
class Kinds(Tape):
    widths: tuple[int, ...] = (64, 64)
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    wide: bool = False
    deep: bool = True


@dataclasses.dataclass(frozen=True)
class Rooted(Tape):
    """A field that must be set although it has a default."""

    root: str = ""

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("root is empty; name a folder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needy(Tape):
    """A field without a default."""

    root: str


@dataclasses.dataclass(frozen=True)
class Unknown(Tape):
    """A field whose type is imported only for type checkers."""

    width: Nowhere = 3  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass(frozen=True)
class Gaps(Tape):
    odd_one: dict[str, Any] = dataclasses.field(default_factory=lambda: {"a": None})


@dataclasses.dataclass(frozen=True)
class Objects(Tape):
    odd_one: object = dataclasses.field(default_factory=object)
