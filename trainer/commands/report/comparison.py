"""Several runs as a sorted table: their metrics, and the settings in which they differ."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.report.figures import format_duration, run_state
from trainer.commands.report.history import History, read_history
from trainer.errors import ConfigError
from trainer.run.finish import best_rule
from trainer.run.run_source import run_folder
from trainer.telemetry.events import writable
from trainer.telemetry.metrics import primary_metric

FALLING = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wall_s", "device_s")
"""Ends of the names of figures of which less is better."""


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


def figures(run: History) -> dict[str, Any]:
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
    known = [{**run.config, **figures(run)} for run in runs]
    if by is not None and (direction not in ("", "min", "max")
                           or all(own.get(name) is None for own in known)):
        names = dict.fromkeys(name for run in runs for name in figures(run))
        raise ConfigError(f"--sort {by}: write NAME, NAME:min or NAME:max, where NAME is a setting "
                          f"of config.toml or one of {', '.join(names)}.")
    if not direction:
        rises = any(name in figures(run) for run in runs) and not name.endswith(FALLING)
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
    found = [figures(run) for run in runs]
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
