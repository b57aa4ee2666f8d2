"""Plots of a report, of one or more runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from trainer.commands.report.charts import (
    ALARM,
    FAINT,
    INK,
    PARTS_COLORS,
    SERIES,
    Plot,
    downsample,
    format_duration,
    smooth,
    time_unit,
)
from trainer.commands.report.figures import STEP_PARTS, affected_rank
from trainer.commands.report.history import PARTS, History
from trainer.telemetry.metrics import RESERVED
from trainer.telemetry.step_timing import own_step_s

MOST_RANKS = 24
"""Ranks in the time line."""
LEGEND_RANKS = 8
MARKERS = {
    "injected fault": ("fault", "X", ALARM), "death or hang": ("death hang failure", "x", ALARM),
    "step skipped": ("skipped", "D", SERIES[4]), "stop": ("stop", "s", INK),
    "save": ("save", "|", INK), "end": ("end", "*", INK),
}  # fmt: skip
"""Label in the time line → its events, marker and colour."""


def plots(runs: Sequence[History]) -> Iterator[Plot]:
    """Yield the plots for which the runs have data, the most important first."""
    trained, timed = any(run.steps for run in runs), any(run.timing for run in runs)
    suffixes = [f" of {run.name}" * (len(runs) > 1) for run in runs]
    if trained:
        note = "Line: training; dots: validation; dotted: a restart."
        yield Plot("loss", "Loss", note, partial(_curves, runs, "loss", "loss"))
        if (metric := primary_metric(runs)) is not None:
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
                       height=1.5 + 0.3 * min(len(_ranks_of(run)), MOST_RANKS))
    if trained:
        yield Plot("gradients", "Gradient norm before clipping",
                   "Dashed: the clipping threshold.", partial(_norms, runs))
    if timed:
        yield Plot("step-time", "Time of a step",
                   "Mean over the ranks; communication is the part that isn't hidden.",
                   partial(_step_time, runs))
        yield Plot("samples", "Samples per second", "Sum over all ranks, while they train.",
                   partial(_samples, runs))
    for number, (run, suffix) in enumerate(zip(runs, suffixes, strict=True)):
        if any(map(_has_ranks, run.timing)):
            yield Plot(f"ranks{number or ''}", f"Ranks{suffix}",
                       "Time of a step on each rank, without waiting for the other ranks.",
                       partial(_ranks, run))
    if timed:
        yield Plot("memory", "Memory", "Largest of all ranks: resident memory, or GPU memory.",
                   partial(_memory, runs))


def primary_metric(runs: Sequence[History]) -> str | None:
    """Choose the metric to plot next to the loss: accuracy, or the first one in the records."""
    names = [name for run in runs for line in run.steps[-1:] for name, value in line.items()
             if name not in RESERVED and isinstance(value, int | float)]
    names += [name.removeprefix("val_") for run in runs for line in run.validations[-1:]
              for name in line if name.startswith("val_")
              and name not in ("val_loss", "val_samples", "val_table")]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def _curves(runs: Sequence[History], key: str, label: str, axes: Axes) -> None:
    several = len(runs) > 1
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        x, y = downsample([(s["step"], s[key]) for s in run.steps if s.get(key) is not None])
        if key != "lr" and len(y) > 60:
            axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
            y = smooth(y, decay=1 - 50 / len(y))
        axes.plot(x, y, color=color, linewidth=1.5, label=run.name if several else "training")
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
    shown = {_short(run.name): run.goodput for run in runs}
    labels = {part: part for part in PARTS}
    if len(runs) == 1:
        spent_s = runs[0].goodput
        shown = {"wall time": spent_s}
        if spent_s["waiting"] > 0:
            shown["while it ran"] = spent_s | {"waiting": 0.0}
        labels = {part: f"{part} {format_duration(spent_s[part])}" for part in PARTS}
    _stacked_bars(axes, list(shown), PARTS_COLORS, {
        labels[part]: [100 * parts[part] / (sum(parts.values()) or 1.0) for parts in shown.values()]
        for part in PARTS})
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")


def _stacked_bars(
    axes: Axes, names: Sequence[str], colors: Sequence[str], widths: Mapping[str, Sequence[float]]
) -> None:
    left = np.zeros(len(names))
    for (label, own), color in zip(widths.items(), colors, strict=True):
        if max(own) > 0:
            axes.barh(names, own, left=left, color=color, height=0.6, label=label)
        left = left + own
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    _legend_above(axes)


def _timeline(run: History, axes: Axes) -> None:
    unit, name = time_unit(run.wall_s - run.goodput["waiting"])
    ranks = _ranks_of(run)[:MOST_RANKS]
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
            axes.barh(rows, widths, left=starts, height=0.55, label=label,
                      color=PARTS_COLORS[PARTS.index(part)])
    for label, (names, marker, color) in MARKERS.items():
        points = [(at(e["time"]), affected_rank(e)) for e in run.events if not e.get("echo")
                  and e["event"] in names.split() and affected_rank(e) in ranks]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=7, label=label,
                      clip_on=False)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    left_out = sum(end - begin for begin, end in gaps)
    axes.set_xlabel(f"{name} since the start" + f", without {format_duration(left_out)} of waiting"
                    * bool(gaps))
    axes.grid(False, axis="y")
    _legend_above(axes)


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


def _ranks_of(run: History) -> list[int]:
    return sorted({rank for times in run.attempt_times for rank in times.ranks})


def _step_time(runs: Sequence[History], axes: Axes) -> None:
    palette = (PARTS_COLORS[1], PARTS_COLORS[0], PARTS_COLORS[2], PARTS_COLORS[3])
    if len(runs) > 1:
        _stacked_bars(axes, [_short(run.name) for run in runs], palette, {
            part: [1000 * sum(_mean(line[f"{part}_s"]) for line in run.timing)
                   / max(1, sum(line["steps"] for line in run.timing)) for run in runs]
            for part in STEP_PARTS})
        axes.set_xlabel("ms a step")
        return
    lines = [line for line in runs[0].timing if line["steps"]]
    series = [downsample([(line["step"], 1000 * _mean(line[f"{part}_s"]) / line["steps"])
                          for line in lines]) for part in STEP_PARTS]
    axes.stackplot(series[0][0], *(y for _, y in series), labels=STEP_PARTS, colors=palette,
                   linewidth=0)
    axes.set_ylim(bottom=0)
    _finish(axes, "ms a step")
    _legend_above(axes, 2)


def _samples(runs: Sequence[History], axes: Axes) -> None:
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        _line(axes, [(line["step"], line["samples"] / line["step_s"][0]) for line in run.timing
                     if line["step_s"][0]], color, run.name if len(runs) > 1 else None)
    axes.set_ylim(bottom=0)
    _finish(axes, "samples/s")


def _memory(runs: Sequence[History], axes: Axes) -> None:
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        _line(axes, [(line["step"], max(filter(None, line["memory_mb"]))) for line in run.timing
                     if any(line["memory_mb"])], color, run.name if len(runs) > 1 else None)
    axes.set_ylim(bottom=0)
    _finish(axes, "MB")


def _has_ranks(line: Mapping[str, Any]) -> bool:
    """Whether a line has the times of several ranks, and of each of them."""
    return len(line["step_s"]) > 1 and None not in line["step_s"] and line["steps"] > 0


def _ranks(run: History, axes: Axes) -> None:
    lines = [line for line in run.timing if _has_ranks(line)]
    rows = [[1000 * own_s / line["steps"] for own_s in own_step_s(line)] for line in lines]
    size = max(map(len, rows))
    for rank, color in zip(range(size), itertools.cycle(SERIES), strict=False):
        points = [(line["step"], row[rank]) for line, row in zip(lines, rows, strict=True)
                  if rank < len(row)]
        _line(axes, points, color, f"rank {rank}" if size <= LEGEND_RANKS else None)
    axes.set_ylim(bottom=0)
    _finish(axes, "ms a step")


def _line(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str | None) -> None:
    x, y = downsample(points)
    axes.plot(x, y, color=color, linewidth=1.5, marker="." if len(x) < 30 else None, label=label)


def _finish(axes: Axes, unit: str) -> None:
    """Label the axes of a plot over the steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_ylabel(unit)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _legend_above(axes: Axes, ncols: int = 3) -> None:
    axes.legend(ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1,
                columnspacing=1.2)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
