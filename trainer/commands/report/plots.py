"""Plots of a report, of one or more runs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from trainer.commands.report.charts import (
    ALARM,
    FAINT,
    INK,
    PARTS_COLORS,
    SERIES,
    Plot,
    downsample,
    format_duration,
    moving_average,
    time_unit,
)
from trainer.commands.report.figures import STEP_PARTS, affected_rank, timing_windows
from trainer.commands.report.history import PARTS, History
from trainer.telemetry.metrics import RESERVED
from trainer.telemetry.step_timing import own_step_s

RANKS, MOST_RANKS = 8, 24
"""RANKS: with more ranks, the slowest, the median and the fastest are drawn. MOST_RANKS: ranks in
the time line."""


def plots(runs: Sequence[History]) -> Iterator[Plot]:
    """Yield the plots for which the runs have data, the most important first."""
    several = len(runs) > 1
    if any(run.steps for run in runs):
        note = "Line: training; dots: validation; dotted: a restart."
        yield Plot("loss", "Loss", note, partial(_curves, runs, "loss", "loss"))
        if (metric := primary_metric(runs)) is not None:
            name = metric.replace("_", " ")
            yield Plot("metric", name.capitalize(), note, partial(_curves, runs, metric, name))
        yield Plot("lr", "Learning rate", "Of the first parameter group.",
                   partial(_curves, runs, "lr", "learning rate", marks=False))
    if any(run.wall_s > 0 for run in runs):
        yield Plot("goodput", "Goodput", "Uses of the wall time.",
                   partial(_goodput, runs), wide=True, height=1.3 + 0.35 * max(2, len(runs)))
    for number, run in enumerate(runs):
        if run.attempt_times:
            own = f" of {run.name}" * several
            yield Plot(f"timeline{number or ''}", f"Time line{own}",
                       "One bar for each rank and attempt.", partial(_timeline, run), wide=True,
                       height=1.5 + 0.3 * min(len(_ranks_of(run)), MOST_RANKS))
    if any(run.steps for run in runs):
        yield Plot("gradients", "Gradient norm before clipping",
                   "Number of steps by norm; dashed: the clipping threshold.",
                   partial(_norms, runs))
    if any(run.timing for run in runs):
        yield Plot("step-time", "Time of a step",
                   "Mean over the ranks; communication is the part that isn't hidden.",
                   partial(_step_time, runs))
        yield Plot("samples", "Samples per second", "Sum over all ranks, while they train.",
                   partial(_over_steps, runs, _samples_per_s, "samples/s"))
    for number, run in enumerate(runs):
        if any(len(line["step_s"]) > 1 and None not in line["step_s"] for line in run.timing):
            own = f" of {run.name}" * several
            yield Plot(f"ranks{number or ''}", f"Ranks{own}",
                       "Time of a step on each rank, without waiting for the other ranks.",
                       partial(_ranks, run))
    if any(run.timing for run in runs):
        yield Plot("memory", "Memory", "Largest of all ranks: resident memory, or GPU memory.",
                   partial(_over_steps, runs, _memory_mb, "MB"))


def primary_metric(runs: Sequence[History]) -> str | None:
    """Choose the metric to plot next to the loss: accuracy, or the first one in the records."""
    names = [name for run in runs for line in run.steps[-1:] for name, value in line.items()
             if name not in RESERVED and isinstance(value, int | float)]
    names += [name.removeprefix("val_") for run in runs for line in run.validations[-1:]
              for name in line if name.startswith("val_")
              and name not in ("val_loss", "val_samples", "val_table")]
    return "accuracy" if "accuracy" in names else next(iter(names), None)


def _curves(
    runs: Sequence[History], key: str, label: str, axes: Axes, *, marks: bool = True
) -> None:
    several = len(runs) > 1
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        points = [(s["step"], s[key]) for s in run.steps if s.get(key) is not None]
        x, y = downsample(points)
        if marks and len(y) > 60:
            axes.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
            y = moving_average(y)
        axes.plot(x, y, color=color, linewidth=1.5, label=run.name if several else "training")
        validated = [(v["step"], v[f"val_{key}"]) for v in run.validations
                     if v.get(f"val_{key}") is not None]
        if validated:
            axes.plot(*zip(*validated, strict=True), "o", markersize=4,
                      color=color if several else INK,
                      label=None if several else "validation")
        if marks and run.attempt_times[1:]:
            axes.vlines([p.attempt.start_step for p in run.attempt_times[1:]], 0, 1, linewidth=1,
                        transform=axes.get_xaxis_transform(), linestyle=":",
                        color=color if several else ALARM)
    if not marks:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    _steps_along(axes)
    axes.set_ylabel(label)
    if marks or several:
        axes.legend()


def _goodput(runs: Sequence[History], axes: Axes) -> None:
    shown = [(_short(run.name), run.goodput) for run in runs]
    if len(runs) == 1:
        shown = [("wall time", runs[0].goodput)]
        if runs[0].goodput["waiting"] > 0:
            shown += [("while it ran", runs[0].goodput | {"waiting": 0.0})]
    labels = {part: part if len(runs) > 1 else f"{part} {format_duration(runs[0].goodput[part])}"
              for part in PARTS}
    _stacked_bars(axes, [name for name, _ in shown], PARTS_COLORS, {
        labels[part]: [100 * parts[part] / (sum(parts.values()) or 1.0) for _, parts in shown]
        for part in PARTS})
    axes.set_xlim(0, 100)
    axes.set_xlabel("%")


def _stacked_bars(
    axes: Axes, names: Sequence[str], colors: Sequence[str], widths: Mapping[str, Sequence[float]]
) -> None:
    left = [0.0] * len(names)
    for (label, own), color in zip(widths.items(), colors, strict=True):
        if max(own) > 0:
            axes.barh(names, own, left=left, color=color, height=0.6, label=label)
        left = [a + b for a, b in zip(left, own, strict=True)]
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    _legend_above(axes)


def _legend_above(axes: Axes, ncols: int = 3) -> None:
    axes.legend(ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1,
                columnspacing=1.2)


def _timeline(run: History, axes: Axes) -> None:
    unit, name = time_unit(run.wall_s - run.goodput["waiting"])
    ranks = _ranks_of(run)[:MOST_RANKS]
    at, gaps = shorten_waiting(run)

    for number, (begin, end) in enumerate(gaps):
        axes.axvspan(at(begin) / unit, at(end) / unit, color=FAINT, linewidth=0,
                     label="waiting" if number == 0 else None)
    bars: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for passage in run.attempt_times:
        for rank, (begin, end) in passage.ranks.items():
            trains = min(end, passage.over if passage.trains is None else passage.trains)
            fault = max(trains, min(end, passage.over if passage.fault is None else passage.fault))
            for label, part, left, right in (
                ("starting", "restarting", begin, trains), ("training", "useful", trains, fault),
                ("stalled", "detecting", fault, end),
            ):  # fmt: skip
                if right > left and rank in ranks:
                    bars.setdefault((label, part, rank), []).append(
                        (at(left) / unit, (at(right) - at(left)) / unit))
    labels = set[str]()
    for (label, part, rank), places in bars.items():
        axes.broken_barh(places, (rank - 0.275, 0.55), color=PARTS_COLORS[PARTS.index(part)],
                         linewidth=0, label=None if label in labels else label)
        labels.add(label)
    kinds = (
        ("fault", "X", ALARM, "injected fault", lambda e: e["event"] == "fault"
         and str(e.get("fault", "")).split(":")[0] != "slow"),
        ("death", "x", ALARM, "death or hang", lambda e: e["event"] in ("death", "hang")
         or (e["event"] == "failure" and not e.get("echo"))),
        ("skipped", "D", SERIES[4], "step skipped", lambda e: e["event"] == "skipped"),
        ("stop", "s", INK, "stop", lambda e: e["event"] == "stop"),
        ("save", "|", INK, "save", lambda e: e["event"] == "save"),
        ("end", "*", INK, "end", lambda e: e["event"] == "end"),
    )
    for _, marker, color, label, fits in kinds:
        found = [(at(e["time"]) / unit, affected_rank(e)) for e in run.events
                 if fits(e) and affected_rank(e) in ranks]
        if found:
            axes.plot(*zip(*found, strict=True), marker, color=color, markersize=7, label=label,
                      markeredgecolor=color, clip_on=False)
    axes.set_yticks(ranks, [f"rank {r}" for r in ranks])
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
    """Return a map from time to position on the axis, and the long waiting gaps that it shortens.

    A position is in seconds since the start of the run.
    """
    running_s = max(1e-9, run.wall_s - run.goodput["waiting"])
    gaps = [(before.over, after.begun) for before, after in itertools.pairwise(run.attempt_times)
            if not before.attempt.relaunched and after.begun - before.over > running_s / 10]
    knots = [(run.begun, 0.0)]
    for begin, end in gaps:
        x = knots[-1][1] + begin - knots[-1][0]
        knots += [(begin, x), (end, x + running_s / 25)]

    def at(time: float) -> float:
        start, x = max((k for k in knots if k[0] <= time), default=knots[0])
        after = next((k for k in knots if k[0] > max(time, start)), None)
        slope = 1.0 if after is None else (after[1] - x) / (after[0] - start)
        return x + (time - start) * slope

    return at, gaps


def _ranks_of(run: History) -> list[int]:
    return sorted({rank for p in run.attempt_times for rank in p.ranks})


def _norms(runs: Sequence[History], axes: Axes) -> None:
    found = [[s["grad_norm"] for s in run.steps if (s.get("grad_norm") or 0) > 0] for run in runs]
    every = [norm for norms in found for norm in norms]
    if every:
        low, high = math.log10(min(every)), math.log10(max(every))
        edges = [10 ** (low + (high - low) * i / 40) for i in range(41)] if high > low else 10
        for run, norms, color in zip(runs, found, itertools.cycle(SERIES), strict=False):
            axes.hist(norms, bins=edges, color=color, alpha=0.85 if len(runs) == 1 else 0.5,
                      label=run.name)
        axes.set_xscale("log")
        if high - low < 2.5:
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", color=FAINT)
    for limit in sorted({run.config.get("clip.norm") or 0.0 for run in runs}):
        if limit:
            axes.axvline(limit, color=ALARM, linestyle="--", linewidth=1.2)
    axes.set_xlabel("norm of the gradient")
    axes.set_ylabel("steps")
    if len(runs) > 1:
        axes.legend()


def _step_time(runs: Sequence[History], axes: Axes) -> None:
    palette = (PARTS_COLORS[1], PARTS_COLORS[0], PARTS_COLORS[2], PARTS_COLORS[3])
    if len(runs) == 1:
        lines = timing_windows(runs[0].timing)
        x = [line["step"] for line in lines]
        rows = [[1000 * _mean(line[f"{part}_s"]) / line["steps"] for line in lines]
                for part in STEP_PARTS]
        axes.stackplot(x, *rows, labels=STEP_PARTS, colors=palette, linewidth=0)
        _steps_along(axes)
        axes.set_ylabel("ms a step")
        axes.set_ylim(bottom=0)
        _legend_above(axes, 2)
    else:
        _stacked_bars(axes, [_short(run.name) for run in runs], palette, {
            part: [1000 * sum(_mean(line[f"{part}_s"]) for line in run.timing)
                   / max(1, sum(line["steps"] for line in run.timing)) for run in runs]
            for part in STEP_PARTS})
        axes.set_xlabel("ms a step")


def _samples_per_s(line: Mapping[str, Any]) -> float | None:
    return line["samples"] / line["step_s"][0] if line["step_s"][0] else None


def _memory_mb(line: Mapping[str, Any]) -> float | None:
    return max((m for m in line["memory_mb"] if m), default=None)


def _over_steps(
    runs: Sequence[History], value: Callable[[Mapping[str, Any]], float | None], unit: str,
    axes: Axes,
) -> None:  # fmt: skip
    for run, color in zip(runs, itertools.cycle(SERIES), strict=False):
        points = [(line["step"], value(line)) for line in timing_windows(run.timing)]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=color, linewidth=1.5, label=run.name,
                      marker="." if len(known) < 30 else None)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    _steps_along(axes)
    if len(runs) > 1:
        axes.legend()


def _ranks(run: History, axes: Axes) -> None:
    lines = timing_windows([line for line in run.timing if None not in line["step_s"]
                            and len(line["step_s"]) > 1])
    size = max(len(line["step_s"]) for line in lines)
    x = [line["step"] for line in lines]
    rows = [[1000 * own / line["steps"] for own in own_step_s(line)] for line in lines]
    if size <= RANKS:
        for rank, color in zip(range(size), itertools.cycle(SERIES), strict=False):
            y = [row[rank] if rank < len(row) else math.nan for row in rows]
            axes.plot(x, y, color=color, linewidth=1.4, label=f"rank {rank}",
                      marker="." if len(x) < 30 else None)
    else:
        for name, reduce, color in (("slowest", max, ALARM),
                                    ("fastest", min, SERIES[2]),
                                    ("median", statistics.median, SERIES[0])):
            axes.plot(x, [reduce(row) for row in rows], color=color, linewidth=1.4, label=name)
    axes.set_ylim(bottom=0)
    _steps_along(axes)
    axes.set_ylabel("ms a step")
    axes.legend(ncols=2)


def _steps_along(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(
        lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x >= 1e4 else f"{x:g}")


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
