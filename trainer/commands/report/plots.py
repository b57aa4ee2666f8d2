"""Plots of a report, of one or more runs, drawn with matplotlib as SVG and PNG."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.commands.report.figures import (
    STEP_PARTS,
    affected_rank,
    format_duration,
    peak_memory_mb,
)
from trainer.commands.report.history import PARTS, History
from trainer.telemetry.drawing import FEW, is_matrix
from trainer.telemetry.metrics import primary_metric
from trainer.telemetry.step_timing import own_step_s

POINTS = 500
"""Longer series are reduced to the means of this many groups."""
MOST_RANKS, LEGEND_RANKS = 24, 8
"""Ranks in the time line, and in a legend."""
MOST_PLAIN = 60
"""Longer series of training are averaged."""

INK, FAINT, ALARM = "#1f2430", "#d4d8e0", "#c62828"
SERIES = ("#2563c9", "#d1571b", "#1b8a5a", "#9244b8", "#a87b00", "#0d8fa8", "#c2376b", "#5b6472")
COLORS = dict(zip(PARTS, ("#2f8f5b", "#d9822b", "#2563c9", "#c2376b", "#8e6bbf", "#9aa3b2"),
                  strict=True))
STEP_COLORS = [COLORS[part] for part in ("redone", "useful", "saving", "detecting")]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "text.parse_math": False, "legend.fontsize": "small",
    "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": FAINT, "axes.facecolor": "none", "axes.grid": True, "axes.axisbelow": True,
    "axes.labelcolor": INK, "text.color": INK, "grid.color": FAINT, "xtick.color": FAINT,
    "ytick.color": FAINT, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
MARKERS = {
    "injected fault": ("fault", "X", ALARM), "death or hang": ("death hang failure", "x", ALARM),
    "step skipped": ("skipped", "D", SERIES[4]), "stop": ("stop", "s", INK),
    "save": ("save", "|", INK), "end": ("end", "*", INK)}
"""Label in the time line → its events, marker and colour."""


@dataclass(frozen=True)
class Plot:
    """A plot with its captions. `draw` draws it on axes."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height: float = 3.1
    of_one: bool = False  # of several runs

    def svg(self) -> str:
        text = self._render("svg", transparent=True, metadata=dict.fromkeys(
            ("Creator", "Date", "Format", "Type"))).decode()
        return text[text.index("<svg"):]

    def png(self) -> bytes:
        """Return a PNG image with title and note, on white."""
        return self._render("png", self.title, self.note, dpi=150, facecolor="white")

    def _render(self, kind: str, title: str = "", note: str = "", **options: Any) -> bytes:
        # The salt keeps the ids of the plots of a page apart.
        width, size = (11.4, 9) if self.wide else (5.2, 11)
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name, "font.size": size}):
            figure = Figure(figsize=(width, self.height), layout="constrained")
            axes = figure.add_subplot()
            self.draw(axes)
            axes.set_title(title, loc="left", fontsize=11)
            figure.supxlabel(textwrap.fill(note, 150 if self.wide else 70), fontsize=8, x=0.01,
                             ha="left", color=INK)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def plots(runs: Sequence[History]) -> Iterator[Plot]:
    """Yield the plots for which the runs have data, the most important first."""
    trained, timed = any(run.steps for run in runs), any(run.timing for run in runs)
    suffixes = [f" of {run.name}" * (len(runs) > 1) for run in runs]
    if trained:
        note = _curve_note(runs, " dots: validation, not averaged;")
        yield Plot("loss", "Loss", note + " Label smoothing, dropout and augmentation are in the "
                   "loss of training only.", partial(_curves, runs, "loss", "loss"))
        if (metric := _primary_metric(runs)) is not None:
            name = metric.replace("_", " ")
            yield Plot("metric", name.capitalize(), note, partial(_curves, runs, metric, name))
        yield Plot("lr", "Learning rate", "Of the first parameter group.",
                   partial(_curves, runs, "lr", "learning rate"))
    if any(run.wall_s > 0 for run in runs):
        yield Plot("goodput", "Goodput", "Uses of the wall time.",
                   partial(_goodput, runs), wide=True, height=1.3 + 0.35 * max(2, len(runs)))
    for number, (run, suffix) in enumerate(zip(runs, suffixes, strict=True)):
        if run.attempt_times:
            yield Plot(f"timeline{number or ''}", f"Time line{suffix}",
                       "One bar for each rank and attempt.", partial(_timeline, run), wide=True,
                       height=1.5 + 0.3 * len(_first_ranks(run)), of_one=len(runs) > 1)
        if (line := last_table(run)) is not None and is_matrix(line["val_table"]):
            yield Plot(f"confusion{number or ''}", f"Confusion{suffix}",
                       f"Samples of the validation at step {line['step']:,}; shade: share of the "
                       "true class.", partial(_confusion, run, line["val_table"]),
                       height=4.4, of_one=len(runs) > 1)
    if trained:
        yield Plot("gradients", "Gradient norm before clipping",
                   f"{_curve_note(runs)} Dashed: the clipping threshold.", partial(_norms, runs))
    if timed:
        yield Plot("step-time", "Time of a step",
                   "Mean over the ranks; communication is the part that isn't hidden.",
                   partial(_step_time, runs))
        yield Plot("samples", "Samples per second", "Sum over all ranks, while they train.",
                   partial(_timing_curves, runs, _samples_per_s, "samples/s"))
    for number, (run, suffix) in enumerate(zip(runs, suffixes, strict=True)):
        if any(map(_has_ranks, run.timing)):
            yield Plot(f"ranks{number or ''}", f"Ranks{suffix}",
                       "Time of a step on each rank, without waiting for the other ranks.",
                       partial(_ranks, run), of_one=len(runs) > 1)
    if timed:
        yield Plot("memory", "Memory", "Largest of all ranks: resident memory, or GPU memory.",
                   partial(_timing_curves, runs, peak_memory_mb, "MB"))


def _primary_metric(runs: Sequence[History]) -> str | None:
    """The metric to plot next to the loss."""
    names = [name for run in runs for line in run.steps[-1:] for name, value in line.items()
             if isinstance(value, int | float)]
    names += [name.removeprefix("val_") for run in runs for line in run.validations[-1:]
              for name in line if name.startswith("val_") and name != "val_table"]
    return primary_metric(names)


def _curve_note(runs: Sequence[History], dots: str = "") -> str:
    averaged = max(len(run.steps) for run in runs) > MOST_PLAIN
    line = "Line: training" + ", averaged over about 2 % of the run (pale: each step)" * averaged
    return f"{line};{dots} dotted: a restart."


def last_table(run: History) -> Mapping[str, Any] | None:
    """The last validation that has a table."""
    return next((line for line in reversed(run.validations) if line.get("val_table")), None)


def _confusion(run: History, table: Sequence[Sequence[float]], axes: Axes) -> None:
    counts = np.asarray(table, dtype=float)
    names = class_names(run, len(counts))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.4)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="predicted", ylabel="true")
    if len(counts) > FEW:
        return
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    for row, column in zip(*counts.nonzero(), strict=True):
        axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=8)


def class_names(run: History, number: int) -> list[str]:
    names = run.environment.get("class_names") or []
    return [str(name) for name in (names if len(names) == number else range(number))]


def _curves(runs: Sequence[History], key: str, label: str, axes: Axes) -> None:
    several = len(runs) > 1
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        turns = sorted({s.get("turn", "") for s in run.steps}) or [""]
        styles = itertools.cycle(("-", "--", ":"))  # of the turns
        for turn, style in zip(turns, styles, strict=False):
            x, y = _downsample([(s["step"], s[key]) for s in run.steps
                                if s.get(key) is not None and s.get("turn", "") == turn])
            averaged = key != "lr" and len(y) > MOST_PLAIN
            if averaged:
                axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
                y = smooth(y, decay=1 - 50 / len(y))
            shown = run.name if several else "training" + ", averaged" * averaged
            axes.plot(x, y, color=color, linewidth=1.5, linestyle=style,
                      label=f"{shown} ({turn})" if turn else shown)
        validated = [(v["step"], v[f"val_{key}"]) for v in run.validations
                     if v.get(f"val_{key}") is not None]
        if validated:
            axes.plot(*zip(*validated, strict=True), "o", markersize=4,
                      color=color if several else INK, label=None if several else "validation")
        for times in run.attempt_times[1:]:
            axes.axvline(times.attempt.start_step, linewidth=1, linestyle=":",
                         color=color if several else ALARM)
    _finish(axes, label)


def _norms(runs: Sequence[History], axes: Axes) -> None:
    _curves(runs, "grad_norm", "norm of the gradient", axes)
    for limit in {run.config.get("clip.norm") or 0.0 for run in runs} - {0.0}:
        axes.axhline(limit, color=ALARM, linestyle="--", linewidth=1.2)


def _goodput(runs: Sequence[History], axes: Axes) -> None:
    shown = {run.name: run.goodput for run in runs}
    if len(runs) == 1:
        spent_s = runs[0].goodput
        shown = {"wall time": spent_s}
        if spent_s["waiting"] > 0:
            shown["while it ran"] = spent_s | {"waiting": 0.0}
    left = np.zeros(len(shown))
    for part, color in COLORS.items():
        widths = [100 * spent_s[part] / (sum(spent_s.values()) or 1.0)
                  for spent_s in shown.values()]
        label = part if len(runs) > 1 else f"{part} {format_duration(runs[0].goodput[part])}"
        if max(widths) > 0:
            axes.barh(list(shown), widths, left=left, color=color, height=0.6, label=label)
        left = left + widths
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")
    _finish_rows(axes)


def _timeline(run: History, axes: Axes) -> None:
    running_s = run.wall_s - run.goodput["waiting"]
    unit, name = next(((unit, name) for limit_s, unit, name in (
        (300, 1, "seconds"), (3 * 3600, 60, "minutes"), (3 * 86400, 3600, "hours"))
        if running_s < limit_s), (86400, "days"))
    ranks = _first_ranks(run)
    position, gaps = shorten_waiting(run)

    def at(time: float) -> float:
        return position(time) / unit

    for number, (begin, end) in enumerate(gaps):
        axes.axvspan(at(begin), at(end), color=FAINT, linewidth=0,
                     label="waiting" if number == 0 else None)
    bars: dict[tuple[str, str], list[tuple[int, float, float]]] = {
        ("starting", "restarting"): [], ("training", "useful"): [], ("stalled", "detecting"): []}
    for times in run.attempt_times:
        for rank, (begin, end) in times.ranks.items():
            for found, since in zip(bars.values(), (begin, times.trains, times.fault), strict=True):
                if since is not None and since < end and rank in ranks:
                    left = at(max(begin, since))
                    found.append((rank, left, at(end) - left))  # covers the rest of the one before
    for (label, part), found in bars.items():
        if found:
            rows, starts, widths = zip(*found, strict=True)
            axes.barh(rows, widths, left=starts, height=0.55, label=label, color=COLORS[part])
    for number, times in enumerate(run.deaths):
        axes.axvline(at(times.over), color=ALARM, linewidth=2.5,
                     label="death of all processes" if number == 0 else None)
    for label, (names, marker, color) in MARKERS.items():
        points = [(at(e["time"]), affected_rank(e)) for e in run.events if not e.get("echo")
                  and e["event"] in names.split() and affected_rank(e) in ranks]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=7, label=label,
                      clip_on=False)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(left=0)
    left_out = sum(end - begin for begin, end in gaps)
    axes.set_xlabel(f"{name} since the start" + f", without {format_duration(left_out)} of waiting"
                    * bool(gaps))
    _finish_rows(axes)


def shorten_waiting(
    run: History,
) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Return a map from time to seconds on the axis, and the long waiting gaps that it shortens."""
    running_s = max(1e-9, run.wall_s - run.goodput["waiting"])
    gaps = [(before.over, after.begun) for before, after in itertools.pairwise(run.attempt_times)
            if not before.attempt.relaunched and after.begun - before.over > running_s / 10]
    times, positions = [run.begun], [0.0]
    for begin, end in gaps:
        reached = positions[-1] + begin - times[-1]
        positions += [reached, reached + running_s / 25]
        times += [begin, end]
    positions.append(positions[-1] + run.over - times[-1])
    return partial(np.interp, xp=[*times, run.over], fp=positions), gaps


def _first_ranks(run: History) -> list[int]:
    return sorted({rank for times in run.attempt_times for rank in times.ranks})[:MOST_RANKS]


def _step_time(runs: Sequence[History], axes: Axes) -> None:
    if len(runs) > 1:
        _timing_curves(runs, partial(_part_ms, part="step"), "ms a step", axes)
        return
    lines = [line for line in runs[0].last_timing if line["steps"]]
    series = [_downsample([(line["step"], _part_ms(line, part)) for line in lines])
              for part in STEP_PARTS]
    axes.stackplot(series[0][0], *(y for _, y in series), labels=STEP_PARTS, colors=STEP_COLORS,
                   linewidth=0)
    axes.set_ylim(bottom=0)
    _finish(axes, "ms a step")
    _legend_above(axes, 2)


def _part_ms(line: Mapping[str, Any], part: str) -> float:
    """Milliseconds of a part of a step, the mean of the ranks that are known."""
    known = [value for value in line[f"{part}_s"] if value is not None]
    return 1000 * sum(known) / len(known) / line["steps"] if known and line["steps"] else 0.0


def _samples_per_s(line: Mapping[str, Any]) -> float | None:
    return line["samples"] / line["step_s"][0] if line["step_s"][0] else None


def _timing_curves(
    runs: Sequence[History], value: Callable[[Mapping[str, Any]], float | None], unit: str,
    axes: Axes,
) -> None:
    """A line for each run, of a value of each line of timing.jsonl that has it."""
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        found = ((line["step"], value(line)) for line in run.last_timing)
        _line(axes, [(step, number) for step, number in found if number], color,
              run.name if len(runs) > 1 else None)
    axes.set_ylim(bottom=0)
    _finish(axes, unit)


def _has_ranks(line: Mapping[str, Any]) -> bool:
    """Whether a line has the times of several ranks, and of each of them."""
    return len(line["step_s"]) > 1 and None not in line["step_s"] and line["steps"] > 0


def _ranks(run: History, axes: Axes) -> None:
    lines = [line for line in run.last_timing if _has_ranks(line)]
    rows = [[1000 * own_s / line["steps"] for own_s in own_step_s(line)] for line in lines]
    size = max(map(len, rows))
    for rank, color in zip(range(size), itertools.cycle(SERIES), strict=False):
        points = [(line["step"], row[rank]) for line, row in zip(lines, rows, strict=True)
                  if rank < len(row)]
        _line(axes, points, color, f"rank {rank}" if size <= LEGEND_RANKS else None)
    axes.set_ylim(bottom=0)
    _finish(axes, "ms a step")


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str | None) -> None:
    x, y = _downsample(points)
    axes.plot(x, y, color=color, linewidth=1.5, marker="." if len(x) < 30 else None, label=label)


def _finish(axes: Axes, unit: str) -> None:
    """Label the axes of a plot over the steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylabel(unit)
    if labels := axes.get_legend_handles_labels()[1]:
        axes.legend() if len(labels) <= 3 else _legend_above(axes, 3)


def _finish_rows(axes: Axes) -> None:
    """Finish a plot with horizontal bars, the first on top."""
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    _legend_above(axes, 3)


def _legend_above(axes: Axes, ncols: int) -> None:
    axes.legend(ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1,
                columnspacing=1.2)


def _downsample(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
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
