"""The lab of docs/lab.md: a small CNN step by step, by the commands of the page.

    python -m benchmarks.lessons.lab [--steps NAME,...]

The bundled sample, offline; minutes on 2 cores. Prints accuracy, seconds per epoch and the share of
steps whose gradient norm is above 0.5, 1, 2 and 5, of all steps and of the second half.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import reporting
from trainer.commands.compare import differences
from trainer.storage.layout import EVENTS, METRICS
from trainer.telemetry.events import read_events
from trainer.telemetry.metrics import read_metrics

PAGE = Path(__file__).parents[2] / "docs/lab.md"
RUNS = Path("runs/lab")
EPOCHS = 4
"""Of each command of the page."""
LIMITS = (0.5, 1.0, 2.0, 5.0)


def commands() -> dict[str, list[str]]:
    """Name of each step → the arguments of Python in its command on the page, in order."""
    found = re.findall(r"^python (-m launch .*--run-dir=runs/lab/([\w-]+) .*)$", PAGE.read_text(),
                       re.MULTILINE)
    return {name: shlex.split(command) for command, name in found}


def seconds(run: Path) -> float:
    """From each attempt's first step to its last event, validations and saves included."""
    times: dict[int, list[float]] = defaultdict(list)
    for event in read_events(run / EVENTS):
        if event["event"] == "first-step" or times[event["attempt"]]:
            times[event["attempt"]].append(event["time"])
    return sum(found[-1] - found[0] for found in times.values() if found)


def report(run: Path) -> dict[str, Any]:
    """The figures of a finished run."""
    lines = read_metrics(run / METRICS)
    # fp16: a step that overflowed has none
    norms = [line["grad_norm"] for line in lines if line.get("grad_norm") is not None]
    late = norms[len(norms) // 2:]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "test": summary["test"]["accuracy"],
        "validation": next(line["val_accuracy"] for line in reversed(lines)
                           if "val_accuracy" in line),
        "epoch_s": (epoch_s := seconds(run) / EPOCHS),
        "samples_s": sum(line.get("samples", 0) for line in lines) / EPOCHS / epoch_s,
        "norms": norms, "percentiles": percentiles(late),
        "clipped": {limit: (share(norms, limit), share(late, limit)) for limit in LIMITS},
    }  # fmt: skip


def share(norms: Sequence[float], limit: float) -> float:
    """The share of steps that the limit would clip."""
    return sum(norm > limit for norm in norms) / len(norms)


def choose(norms: Sequence[float]) -> float:
    """The smallest round value that clips fewer than 5 % of these steps."""
    return next(v for v in (*LIMITS, 10.0, 20.0, 50.0, float("inf")) if share(norms, v) < 0.05)


def percentiles(norms: Sequence[float]) -> dict[int, float]:
    """The 50th, 90th, 95th and 99th percentile."""
    cuts = statistics.quantiles(norms, n=100, method="inclusive")
    return {p: cuts[p - 1] for p in (50, 90, 95, 99)}


def histogram(norms: Sequence[float], width: int = 40) -> str:
    """The norms in bins whose edges double, as text."""
    edges = [2.0**n for n in range(-3, 7)]
    counts = [sum(low <= norm < high for norm in norms)
              for low, high in zip([0.0, *edges], [*edges, float("inf")], strict=True)]
    return "\n".join(
        f"  below {edge:>6g}  {'#' * round(width * count / max(counts))} {count}"
        for edge, count in zip([*edges, float("inf")], counts, strict=True) if count)


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each step of the lab."""
    header = ["step", "test", "validation", "s an epoch", "samples/s",
              *[f"> {limit:g}: all / late" for limit in LIMITS], "95th, 99th percentile, late"]
    return reporting.table(header, [
        [name, f"{r['test']:.3f}", f"{r['validation']:.3f}", f"{r['epoch_s']:.1f}",
         f"{r['samples_s']:,.0f}",
         *[f"{all_:.0%} / {late:.0%}".replace("%", " %") for all_, late in r["clipped"].values()],
         f"{r['percentiles'][95]:.2f}, {r['percentiles'][99]:.2f}"]
        for name, r in found.items()])


def train(command: list[str]) -> int:
    """The exit code of a run."""
    return subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL,
                          env=reporting.environment()).returncode


def resume(command: list[str], run: Path) -> int:
    """The exit code of the killed run, which is given the same command again and compared."""
    code, killed_at = train(command), read_metrics(run / METRICS)[-1]["step"]
    print(f"  exit code {code} after step {killed_at}; the same command again")
    code, reference = train(command), RUNS / "checkpoints"
    if reference.exists():
        found = list(differences(reference, run))
        print(f"  compared with {reference.name}: {found[0] if found else 'same bits'}")
    return code


def main() -> None:
    steps = commands()
    parser = reporting.parser("lessons.lab", __doc__)
    parser.add_argument("--steps", type=reporting.some_of(steps), default=",".join(steps),
                        help="(%(default)s)")
    options = parser.parse_args()
    machine, found = reporting.machine(), dict[str, dict[str, Any]]()
    for name in options.steps:
        run, command = RUNS / name, steps[name]
        print(f"\n{name}: python {shlex.join(command)}", flush=True)
        if code := resume(command, run) if name == "killed" else train(command):
            raise SystemExit(f"{name} ended with {code}")
        found[name] = report(run)
        norms = found[name].pop("norms")
        if name == "one-cycle":
            late = norms[len(norms) // 2:]
            below = ", ".join(f"{p} % below {value:.2f}" for p, value in percentiles(late).items())
            print(f"{histogram(norms)}\n  late steps: {below}; {choose(late):g} clips fewer than "
                  "5 % of them")
        if name == "checkpoints":
            kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
            best = json.loads((run / "summary.json").read_text())["best"]["step"]
            print(f"  kept: {', '.join(kept)}; the best is step {best}")
    print("\n" + table(found))
    reporting.print_json("lab", machine=machine, steps=found)


if __name__ == "__main__":
    reporting.finish(main)
