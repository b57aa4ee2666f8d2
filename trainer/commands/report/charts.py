"""Render a plot with matplotlib as SVG or PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

POINTS = 500
"""Longer series are reduced to the means of this many groups."""

INK, FAINT, ALARM = "#1f2430", "#d4d8e0", "#c62828"
SERIES = ("#2563c9", "#d1571b", "#1b8a5a", "#9244b8", "#a87b00", "#0d8fa8", "#c2376b", "#5b6472")
PARTS_COLORS = ("#2f8f5b", "#d9822b", "#2563c9", "#c2376b", "#8e6bbf", "#9aa3b2")
"""One for each of `history.PARTS`; the plot of step times uses four of them."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "legend.fontsize": "small",
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.facecolor": "none", "axes.grid": True, "axes.axisbelow": True,
    "axes.labelcolor": INK, "text.color": INK, "grid.color": FAINT, "xtick.color": FAINT,
    "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """A plot with its captions. `draw` draws it on axes."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height: float = 3.1

    def svg(self) -> str:
        """Return an <svg> element."""
        text = self._render("svg", transparent=True, metadata=dict.fromkeys(
            ("Creator", "Date", "Format", "Type"))).decode()
        return text[text.index("<svg"):]

    def png(self) -> bytes:
        """Return a PNG image with a title, on white."""
        return self._render("png", self.title, dpi=150, facecolor="white")

    def _render(self, kind: str, title: str = "", **options: Any) -> bytes:
        # The salt keeps the ids of the plots of a page apart.
        width, size = (11.4, 9) if self.wide else (5.2, 11)
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name, "font.size": size}):
            figure = Figure(figsize=(width, self.height), layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes)
            axes.set_title(title, loc="left", fontsize=11)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def downsample(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return x and y of at most `POINTS` points. A longer series gives the means of groups."""
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [g[-1][0] for g in groups], [sum(y for _, y in g) / len(g) for g in groups]


def smooth(values: Sequence[float], decay: float) -> list[float]:
    """Return the exponential moving average, with bias correction."""
    smoothed, average = [], 0.0
    for number, value in enumerate(values, 1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**number))
    return smoothed


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose a unit for a duration: (its length in seconds, its name)."""
    return (1.0, "seconds") if seconds < 300 else (60.0, "minutes") if seconds < 3 * 3600 else (
        3600.0, "hours") if seconds < 3 * 86400 else (86400.0, "days")


def format_duration(seconds: float) -> str:
    """Format a duration on one line: 3.4 s, 12 min 5 s, 7 h 3 min."""
    if seconds < 0.1:
        text = f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "0 s"
    elif seconds < 100:
        text = f"{seconds:.1f} s"
    else:
        minutes, rest = divmod(round(seconds), 60)
        hours, left = divmod(minutes, 60)
        text = f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
    return text.replace(" ", "\N{NO-BREAK SPACE}")
