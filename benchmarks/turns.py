"""Contestants measured in turn (A B C A B C …): what disturbs the machine meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def in_turn(
    contestants: Mapping[str, Callable[[], object]], rounds: int, *, warm: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` for each contestant after `warm` rounds that don't count.

    A contestant that returns a float has measured itself, in whatever unit.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm + rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            own = run()
            seconds = time.perf_counter() - began
            if turn >= warm:
                found[name].append(own if isinstance(own, float) else seconds)
    return found


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first / second, turn by turn: what slows down a whole turn cancels out."""
    return [a / b for a, b in zip(first, second, strict=True)]


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line of least squares through the values.

    Raises:
        ValueError: fewer than two values, or all at one place.
    """
    middle, mean = statistics.fmean(places), statistics.fmean(values)
    spread = sum((place - middle) ** 2 for place in places)
    if not spread:
        raise ValueError("a slope needs values at two places or more")
    return sum((p - middle) * (v - mean) for p, v in zip(places, values, strict=True)) / spread
