"""What all benchmarks say alike: the machine, medians with their spread, tables, one JSON line."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from trainer.telemetry.std_streams import quiet_broken_pipe


def finish(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's command, and leave with its exit code; with no word where nobody reads what
    it prints any more (`| head`)."""
    with quiet_broken_pipe():
        code = main()
    sys.exit(code)


def machine() -> dict[str, Any]:
    """Where the figures were made, and how busy that machine was with other things just before."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def describe(found: Mapping[str, Any]) -> str:
    """The machine in one line, for people."""
    return (f"{found['cpu']}, {found['cores']} cores, {found['memory_gb']} GB, {found['system']}, "
            f"Python {found['python']}, torch {found['torch']}, load {found['load_average']}")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes of at least one measurement."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"n": len(values), "median": statistics.median(values), "q1": low, "q3": high,
            "min": min(values), "max": max(values)}


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float, float]:
    """(median, and the ends of its 95 % interval by bootstrap)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def spread(found: Mapping[str, float], scale: float = 1.0, digits: int = 1) -> str:
    """`MEDIAN (Q1 – Q3)` of a `summary`, each times `scale`."""
    median, low, high = (f"{found[key] * scale:,.{digits}f}" for key in ("median", "q1", "q3"))
    return f"{median} ({low} – {high})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, which reads well as plain text too: columns flush right but the first."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *[cell.rjust(width) for cell, width in others]]
        return f"| {' | '.join(cells)} |"

    widths = [max(width, 3) for width in widths]
    rule = ["-" * widths[0], *["-" * (w - 1) + ":" for w in widths[1:]]]
    return "\n".join([show(lines[0]), show(rule), *[show(line) for line in lines[1:]]])


def print_json(name: str, **fields: Any) -> None:
    """The one line for programs, last."""
    print(json.dumps({"benchmark": name, **fields}))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
