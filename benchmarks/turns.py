"""Contestants measured in turn (A B C A B C …): other work on the machine affects all equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def in_turn(
    contestants: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 1
) -> dict[str, list[Any]]:
    """Results of each contestant, one a round, after `warm` rounds that do not count.

    A result is what the call returns, or its seconds if it returns None.
    """
    found: dict[str, list[Any]] = {name: [] for name in contestants}
    for turn in range(warm + rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - began
            if turn >= warm:
                found[name].append(seconds if result is None else result)
    return found


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first / second, turn by turn, so that what slows down a whole turn cancels out."""
    return [a / b for a, b in zip(first, second, strict=True)]
