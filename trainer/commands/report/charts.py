"""Render a plot with matplotlib, as SVG in the colours of the page or as PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

NARROW, WIDE = (5.2, 3.1), (11.4, 3.1)
POINTS = 500
"""Longer series are reduced to the means of this many groups."""

@dataclass(frozen=True)
class Colors:
    """Palette of a plot: colours, or placeholders that the style sheet of the page replaces."""

    ink: str
    faint: str
    series: tuple[str, ...]
    parts: tuple[str, ...]
    """One for each of `history.PARTS`; the plot of step times uses four of them."""
    alarm: str


LIGHT = Colors(
    ink="#1f2430", faint="#d4d8e0",
    series=("#2563c9", "#d1571b", "#1b8a5a", "#9244b8", "#a87b00", "#0d8fa8", "#c2376b", "#5b6472"),
    parts=("#2f8f5b", "#d9822b", "#2563c9", "#c2376b", "#8e6bbf", "#9aa3b2"), alarm="#c62828",
)  # fmt: skip
DARK = Colors(
    ink="#e4e8f0", faint="#39404d",
    series=("#6ea4ff", "#ff9f5f", "#52c894", "#cf93ee", "#e0b84a", "#4fc6dc", "#f485ad", "#a3adbb"),
    parts=("#4fb57f", "#f0a04b", "#6ea4ff", "#f485ad", "#b79ae0", "#717b8c"), alarm="#ff7a70",
)  # fmt: skip
_VARIABLES = ("ink", "faint", "alarm", *(f"series{i}" for i in range(8)),
              *(f"part{i}" for i in range(6)))
_PLACEHOLDERS = {name: f"#0b0c{16 + i:02x}" for i, name in enumerate(_VARIABLES)}
BY_NAME = Colors(
    ink=_PLACEHOLDERS["ink"], faint=_PLACEHOLDERS["faint"], alarm=_PLACEHOLDERS["alarm"],
    series=tuple(_PLACEHOLDERS[f"series{i}"] for i in range(8)),
    parts=tuple(_PLACEHOLDERS[f"part{i}"] for i in range(6)),
)  # fmt: skip


def css_variables(colors: Colors) -> str:
    """CSS variables that the SVG of this module refers to."""
    values = [colors.ink, colors.faint, colors.alarm, *colors.series, *colors.parts]
    return " ".join(f"--{n}: {v};" for n, v in zip(_VARIABLES, values, strict=True))


@dataclass(frozen=True)
class Plot:
    """A plot with its captions. `draw` draws it on axes."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes, Colors], None]
    wide: bool = False
    height: float = NARROW[1]

    def svg(self, *, wide: bool = False) -> str:
        """Return an <svg> element for a page that defines the CSS variables of `css_variables`."""
        buffer = io.StringIO()
        with self._figure(BY_NAME, wide) as figure:
            figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(
                ("Creator", "Date", "Format", "Type")))
        text = buffer.getvalue()
        text = text[text.index("<svg"):]
        for name, placeholder in _PLACEHOLDERS.items():
            text = text.replace(placeholder, f"var(--{name})")
        return text

    def png(self) -> bytes:
        """Return a PNG image with a title, on white."""
        buffer = io.BytesIO()
        with self._figure(LIGHT, self.wide) as figure:
            figure.axes[0].set_title(self.title, loc="left", fontsize=11, color=LIGHT.ink)
            figure.savefig(buffer, format="png", dpi=150, facecolor="white")
        return buffer.getvalue()

    def _figure(self, colors: Colors, wide: bool) -> Any:
        return _FigureContext(self, colors, (WIDE if wide else NARROW)[0])


class _FigureContext:
    """Context manager: a drawn figure, under matplotlib settings that end with the block."""

    def __init__(self, plot: Plot, colors: Colors, width: float) -> None:
        self._plot, self._colors, self._width = plot, colors, width
        self._settings = mpl.rc_context({
            "svg.fonttype": "none", "svg.hashsalt": f"{plot.name}{width}",
            "font.size": 11 if width == NARROW[0] else 9, "legend.fontsize": "small",
            "text.parse_math": False, "font.family": "sans-serif", "path.simplify_threshold": 0.5,
            "axes.formatter.useoffset": False,
        })  # fmt: skip

    def __enter__(self) -> Figure:
        self._settings.__enter__()
        colors = self._colors
        figure = Figure(figsize=(self._width, self._plot.height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(colors.faint)
        axes.grid(True, color=colors.faint, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colors.ink, length=3, color=colors.faint)
        self._plot.draw(axes, colors)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(colors.ink)
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_visible(False)
            for text in legend.get_texts():
                text.set_color(colors.ink)
        return figure

    def __exit__(self, *error: Any) -> None:
        self._settings.__exit__(*error)


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
