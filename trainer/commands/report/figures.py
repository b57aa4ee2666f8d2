"""Figures of one run, as text, and of several runs, as a sorted table; notable events."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.report.history import History, read_history
from trainer.errors import ConfigError
from trainer.resilience.attempts import Event
from trainer.run.finish import best_rule
from trainer.run.run_dir import early_end
from trainer.run.run_source import run_folder
from trainer.telemetry.events import writable
from trainer.telemetry.metrics import primary_metric

ORDINARY = ("start", "fresh", "restore", "first-step", "save", "mirror", "lost-peer")
"""Events of every healthy run, and `lost-peer`, which follows the failure of another rank."""
DEATH = "died: every process has ended without an event (killed from outside, or the host failed)"
"""How an attempt ended that nothing has recorded."""

STEP_PARTS = ("data", "compute", "communication", "save")
FALLING = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wall_s", "device_s")
"""Ends of the names of figures of which less is better."""


def notable_events(run: History) -> Iterator[tuple[Event, str]]:
    """Yield the notable events, each with a description.

    An event that several ranks report appears once. Secondary failures, which follow from the
    failure of another rank, are left out. Deaths of all processes, which have none, are added.
    """
    seen = set[tuple[Any, ...]]()
    deaths = [{"time": times.over, "attempt": times.attempt.number, "rank": "all",
               "step": times.attempt.reached or times.attempt.end_step, "event": DEATH}
              for times in run.deaths]
    for event in sorted([*run.events, *deaths], key=lambda event: event["time"]):
        name = event["event"]
        if name in ORDINARY or event.get("echo") or event.get("error") == "StaleAttempt":
            continue
        what = event.get("fault") or event.get("why") or event.get("what") or ""
        key = (event["attempt"], name, event.get("at_step", event["step"]), what)
        if key not in seen:
            seen.add(key)
            yield event, f"{name}: {what}" if what else name


def affected_rank(event: Event) -> Any:
    """Return the rank that an event is about: for a hang its culprit, not the reporting rank."""
    culprit = event.get("culprit")
    return event["rank"] if culprit is None else culprit


def summary(run: History) -> dict[str, str]:
    """Return the figures of a run by name, as text, the most important first."""
    last, result = run.steps[-1] if run.steps else {}, run.summary or {}
    best, determinism = result.get("best") or {}, run.environment.get("determinism") or {}
    skipped = sum(bool(step.get("skipped")) for step in run.steps)
    faults = sum(event["event"] == "fault" for event in run.events)
    lost_s = [f"{part} {format_duration(seconds)}" for part, seconds in run.goodput.items()
              if part != "useful" and seconds >= 0.0005]
    rows = {
        "state": run_state(run), "steps": f"{last.get('step', 0):,}",
        "loss of the last step": _number(last.get("loss")),
        f"best {str(best.get('metric')).replace('_', ' ')}":
            "" if best.get("value") is None else
            f"{_number(best['value'])} at step {best['step']:,}",
        **{f"test {name}": _number(value) for name, value in (result.get("test") or {}).items()
           if name != "samples"},
        "wall time": format_duration(run.wall_s),
        "device time": f"{format_duration(run.device_s)} of computing, over all ranks"
        if run.device_s else "", "goodput": _goodput(run),
        "not useful": ", ".join(lost_s) or "nothing",
        "attempts": str(len(run.attempt_times)), "injected faults": str(faults) if faults else "",
        "mirror": _mirror(run),
        "repeated steps": f"{run.lost_steps:,}", "steps without an update": f"{skipped:,}",
        "clipped steps": _clipped(run), **_speed(run),
        "result": f"{determinism.get('label', '')} {determinism.get('why', '')}".strip()}
    return {name: value for name, value in rows.items() if value}


def run_state(run: History) -> str:
    if run.summary is not None and run.steps and run.summary.get("step") == run.steps[-1]["step"]:
        return f"finished{early_end(run.summary)}"
    if not run.attempt_times:
        return "not started"
    return run.attempt_times[-1].attempt.end


def _goodput(run: History) -> str:
    """Format the useful share of the wall time, and of the wall time without waiting."""
    useful_s, waiting_s = run.goodput["useful"], run.goodput["waiting"]
    if run.wall_s <= waiting_s:
        return ""
    whole = f"{useful_s / run.wall_s:.1%}"
    running = f"{useful_s / (run.wall_s - waiting_s):.1%}"
    return f"{running} while it ran, {whole} of the wall time" if waiting_s else whole


def _mirror(run: History) -> str:
    """Format the uploads to the mirror: number, bytes, speed, and the longest delay."""
    uploads = [event for event in run.events if event["event"] == "mirror"
               and event.keys() >= {"bytes", "seconds", "lag_s"}]
    size, seconds = (sum(event[name] for event in uploads) for name in ("bytes", "seconds"))
    if not seconds:
        return ""
    return (f"{len(uploads)} uploads, {size / 1e6:,.0f} MB at {size / 1e6 / seconds:.3g} MB/s, at "
            f"most {format_duration(max(event['lag_s'] for event in uploads))} behind")


def _clipped(run: History) -> str:
    limit = run.config.get("clip.norm")
    clipped = [step["grad_norm"] > limit for step in run.steps
               if limit and step.get("grad_norm") is not None]
    if not clipped:
        return ""
    half = clipped[len(clipped) // 2 :]
    return f"{sum(clipped) / len(clipped):.1%}, in the last half {sum(half) / len(half):.1%}"


def _speed(run: History) -> dict[str, str]:
    timing = [line for line in run.timing if line["step_s"][0]]
    steps = max(1, sum(line["steps"] for line in timing))
    mean_s = {part: sum(line[f"{part}_s"][0] or 0.0 for line in timing) / steps
              for part in ("step", *STEP_PARTS)}
    if not mean_s["step"]:
        return {}
    split = ", ".join(f"{part} {1000 * mean_s[part]:,.1f} ms" for part in STEP_PARTS)
    memory_mb = max(peak_memory_mb(line) or 0.0 for line in timing)
    samples = sum(line["samples"] for line in timing) / steps
    return {"time of a step": f"{1000 * mean_s['step']:,.1f} ms: {split}",
            "samples/s": f"{samples / mean_s['step']:,.0f}",
            "memory of a rank": f"{memory_mb:,.0f} MB at most" if memory_mb else ""}


def peak_memory_mb(line: Mapping[str, Any]) -> float | None:
    return max((memory for memory in line["memory_mb"] if memory), default=None)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


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


def read_runs(runs: Sequence[Path | str]) -> list[History]:
    """The histories of runs in folders or at URLs, named by these if their names are not unique;
    files and lines that can't be used are named on stderr."""
    found = []
    for run in runs:
        with run_folder(run) as folder:
            found.append(read_history(folder))
    if len({one.name for one in found}) < len(found):
        found = [dataclasses.replace(one, name=str(run))
                 for one, run in zip(found, runs, strict=True)]
    for what in (what for one in found for what in one.damage):
        print(writable(f"damaged: {what}"), file=sys.stderr)
    return found


def best_validation(run: History) -> tuple[Mapping[str, Any], str, str]:
    """The line of the best validation, the metric that selects it, and "max" or "min"."""
    if not run.validations:
        return {}, "", ""
    names = [name for name in run.validations[-1] if name.startswith("val_")
             and name not in ("val_table", "val_samples")]
    name, direction = best_rule(run.config.get("eval.best", "auto"), names)
    choose = max if direction == "max" else min
    known = [line for line in run.validations if line.get(name) is not None]
    return choose(known, key=lambda line: line[name], default=run.validations[-1]), name, direction


def figures_of(run: History) -> dict[str, Any]:
    """The figures of a run that runs can be sorted by; of its validations, those of the best."""
    line, *_ = best_validation(run)
    last = run.steps[-1] if run.steps else {}
    test = (run.summary or {}).get("test") or {}
    found = {
        "step": last.get("step", 0), "loss": last.get("loss"), "wall_s": run.wall_s,
        "device_s": run.device_s,
        **{name: value for name, value in line.items() if name.startswith("val_")},
        **{f"test_{name}": value for name, value in test.items()}}
    return {name: value for name, value in found.items()
            if isinstance(value, int | float) and not name.endswith("_samples")}


def sort_runs(runs: Sequence[History], by: str | None) -> list[History]:
    """The runs, the best first, by a figure or a setting, NAME[:min|max]; by default by the metric
    that selects the best weights of the first run with a validation. Runs without a value come
    last."""
    _, chosen, best = best_validation(next((run for run in runs if run.validations), runs[0]))
    name, _, direction = (by or chosen or "loss").partition(":")
    known = [{**run.config, **figures_of(run)} for run in runs]
    if by is not None and (direction not in ("", "min", "max")
                           or all(own.get(name) is None for own in known)):
        names = dict.fromkeys(name for run in runs for name in figures_of(run))
        raise ConfigError(f"--sort {by}: write NAME, NAME:min or NAME:max, where NAME is a setting "
                          f"of config.toml or one of {', '.join(names)}.")
    if not direction:
        rises = any(name in figures_of(run) for run in runs) and not name.endswith(FALLING)
        direction = best if name == chosen else "max" if rises else "min"

    def key(number: int) -> tuple[bool, float, str]:
        value: Any = known[number].get(name)
        sign = -1 if direction == "max" else 1
        is_number = isinstance(value, int | float)
        return value is None, sign * value if is_number else 0.0, "" if is_number else str(value)

    return [runs[number] for number in sorted(range(len(runs)), key=key)]


def run_table(runs: Sequence[History], by: str | None) -> list[list[str]]:
    """The rows of the table, the head first. States, steps, ranks and settings are columns if they
    differ."""
    found = [figures_of(run) for run in runs]
    metric = primary_metric(name.removeprefix("val_") for own in found for name in own
                            if name.startswith("val_"))
    names = dict.fromkeys([(by or "").partition(":")[0], best_validation(runs[0])[1],
                           "val_loss" if any(run.validations for run in runs) else "loss",
                           f"test_{metric}"])
    differing = _differing([{"state": run_state(run), "step": own["step"]}
                            for run, own in zip(runs, found, strict=True)])
    columns = {"run": [run.name for run in runs],
               **{name: [*map(_text, values)] for name, values in differing.items()}}
    for name in names:
        if name not in ("step", "wall_s") and any(name in own for own in found):
            columns[name] = [f"{own[name]:.4f}" if name in own else "" for own in found]
    columns["wall time"] = [format_duration(run.wall_s) for run in runs]
    columns |= {name: [*map(_text, values)] for name, values in differing_settings(runs).items()}
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def differing_settings(runs: Sequence[History]) -> dict[str, list[Any]]:
    """The number of ranks and the settings that differ between runs, with the values of all of
    them."""
    return _differing([{"ranks": run.environment.get("world_size"), **run.config} for run in runs])


def _differing(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for own in values for name in own if name != "run")
    found = {name: [own.get(name) for own in values] for name in names}
    return {name: own for name, own in found.items() if len({*map(_text, own)}) > 1}


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns, with control characters escaped: they come from files."""
    rows = [[writable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                     .rstrip() for row in rows)
