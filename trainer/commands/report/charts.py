"""Render a plot with matplotlib, as SVG in the colours of the page or as PNG."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NARROW, WIDE = 5.2, 11.4
"""Widths of plots, in inches."""
POINTS = 500
"""Longer series are reduced to the means of this many groups."""

INK, FAINT, ALARM = "#1f2430", "#d4d8e0", "#c62828"
SERIES = ("#2563c9", "#d1571b", "#1b8a5a", "#9244b8", "#a87b00", "#0d8fa8", "#c2376b", "#5b6472")
PARTS_COLORS = ("#2f8f5b", "#d9822b", "#2563c9", "#c2376b", "#8e6bbf", "#9aa3b2")
"""One for each of `history.PARTS`; the plot of step times uses four of them."""
DARK = {
    INK: "#e4e8f0", FAINT: "#39404d", ALARM: "#ff7a70", "#2563c9": "#6ea4ff", "#d1571b": "#ff9f5f",
    "#1b8a5a": "#52c894", "#9244b8": "#cf93ee", "#a87b00": "#e0b84a", "#0d8fa8": "#4fc6dc",
    "#c2376b": "#f485ad", "#5b6472": "#a3adbb", "#2f8f5b": "#4fb57f", "#d9822b": "#f0a04b",
    "#8e6bbf": "#b79ae0", "#9aa3b2": "#717b8c",
}  # fmt: skip
"""Each colour of a plot → its colour in the page's dark scheme."""


def css_variables(*, dark: bool = False) -> str:
    """CSS variables that the SVG of this module refers to, --c1f2430 for #1f2430."""
    return " ".join(f"--c{light[1:]}: {DARK[light] if dark else light};" for light in DARK)


@dataclass(frozen=True)
class Plot:
    """A plot with its captions. `draw` draws it on axes."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height: float = 3.1

    def svg(self, *, wide: bool = False) -> str:
        """Return an <svg> element for a page that defines the CSS variables of `css_variables`."""
        buffer = io.StringIO()
        with self._figure(wide) as figure:
            figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(
                ("Creator", "Date", "Format", "Type")))
        text = buffer.getvalue()
        text = text[text.index("<svg"):]
        for color in DARK:
            text = text.replace(color, f"var(--c{color[1:]})")
        return text

    def png(self) -> bytes:
        """Return a PNG image with a title, on white."""
        buffer = io.BytesIO()
        with self._figure(self.wide) as figure:
            figure.axes[0].set_title(self.title, loc="left", fontsize=11, color=INK)
            figure.savefig(buffer, format="png", dpi=150, facecolor="white")
        return buffer.getvalue()

    @contextlib.contextmanager
    def _figure(self, wide: bool) -> Iterator[Figure]:
        """A drawn figure, under matplotlib settings that end with the block."""
        width = WIDE if wide else NARROW
        with mpl.rc_context({
            "svg.fonttype": "none", "svg.hashsalt": f"{self.name}{width}",
            "font.size": 9 if wide else 11, "legend.fontsize": "small", "legend.frameon": False,
            "text.parse_math": False, "font.family": "sans-serif", "path.simplify_threshold": 0.5,
            "axes.formatter.useoffset": False, "axes.spines.top": False,
            "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.facecolor": "none",
            "axes.grid": True, "axes.axisbelow": True, "axes.labelcolor": INK, "text.color": INK,
            "grid.color": FAINT, "grid.linewidth": 0.6, "xtick.color": FAINT, "ytick.color": FAINT,
            "xtick.labelcolor": INK, "ytick.labelcolor": INK, "xtick.major.size": 3,
            "ytick.major.size": 3,
        }):  # fmt: skip
            figure = Figure(figsize=(width, self.height), layout="constrained")
            self.draw(figure.add_subplot())
            yield figure


def downsample(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return x and y of at most `POINTS` points. A longer series gives the means of groups."""
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [g[-1][0] for g in groups], [sum(y for _, y in g) / len(g) for g in groups]


def moving_average(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about 2 % of the values, with bias correction."""
    keep = 1 - 1 / max(1.0, 0.02 * len(values))
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(total / weight)
    return means


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
