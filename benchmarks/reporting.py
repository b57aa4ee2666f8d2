"""Shared by all benchmarks: options, measuring in turn, medians with their spread, tables, JSON.

Contestants are measured in turn (A B C A B C …), so that other work on the machine affects all
equally.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from trainer.telemetry.std_streams import quiet_broken_pipe


def finish(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's command and exit with its code, quietly if the output's reader has gone."""
    with quiet_broken_pipe():
        code = main()
    sys.exit(code)


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`; the description is the module's docstring."""
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these names, separated by commas."""
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(
                f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return chosen
    return parse


def installed(contestants: Sequence[str]) -> list[str]:
    """The contestants without those whose package is missing; prints which."""
    packages = {"lightning": "pytorch_lightning", "accelerate": "accelerate"}
    missing = [name for name in contestants
               if (package := packages.get(name.removesuffix("-logging")))
               and importlib.util.find_spec(package) is None]
    if missing:
        print(f"left out: {', '.join(missing)}; pip install -e '.[bench]' for them", flush=True)
    return [name for name in contestants if name not in missing]


def numbers(text: str) -> list[float]:
    """The type of an option that takes numbers, separated by commas."""
    return [float(number) for number in text.split(",")]


def environment(**more: str) -> dict[str, str]:
    """The environment of this process, for commands that import this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def machine() -> dict[str, Any]:
    """The machine, and its load before the benchmark; prints it in one line."""
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    found = {
        "cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(), "torch": metadata.version("torch"),
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    print(f"{found['cpu']}, {found['cores']} cores, {found['memory_gb']} GB, {found['system']}, "
          f"Python {found['python']}, torch {found['torch']}, load {found['load_average']}",
          flush=True)
    return found


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


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes of at least one measurement."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"n": len(values), "median": statistics.median(values), "q1": low, "q3": high,
            "min": min(values), "max": max(values)}


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def spread(found: Mapping[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """`MEDIAN (Q1 – Q3)` of a `summary`, each times `scale`."""
    return within([found[key] * scale for key in ("median", "q1", "q3")], f",.{digits}f")


def within(found: Sequence[float], form: str = ".3f") -> str:
    """`MEDIAN (LOW – HIGH)` of an `interval`."""
    median, low, high = (format(value, form) for value in found)
    return f"{median} ({low} – {high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it can be read as text."""
    lines = [header, *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]),
                          *(cell.rjust(width) for cell, width in
                            zip(line[1:], widths[1:], strict=True))]) + " |"
        for line in [header, rule, *rows])


def print_json(name: str, **fields: Any) -> None:
    """The last line of the output, for programs."""
    print(json.dumps({"benchmark": name, **fields}))
