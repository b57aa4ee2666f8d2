"""The lab of docs/lab.md: a small CNN step by step, each step one command.

    python -m benchmarks.lab [--epochs 4] [--folder runs/lab] [--ranks 2] [--steps NAME,...]

The bundled sample, offline; minutes on 2 cores. Prints accuracy, seconds an epoch and the share of
steps whose gradient norm lies above 0.5, 1, 2 and 5, overall and in the second half; draws the
norms (norms.png) and the accuracy of a run that was killed and resumed (curve.png).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import reporting
from trainer.commands.compare import differences

LIMITS = (0.5, 1.0, 2.0, 5.0)
ENOUGH = 0.05
"""Share of late steps that a clip value may clip."""


@dataclass(frozen=True)
class Recipe:
    """A step of the lab: the flags that it adds, and whether later steps keep them."""

    name: str
    flags: tuple[str, ...]
    kept: bool = True


RECIPES = (
    Recipe("baseline", (
        "--batch.micro-size=64", "--schedule.name=constant", "--schedule.warmup=off",
        "--optim.lr=1e-3", "--optim.weight-decay=0", "--clip.norm=0", "--checkpoint.every=off")),
    Recipe("one-cycle", (
        "--schedule.name=one-cycle", "--schedule.options=pct_start=0.3", "--optim.lr=3e-3")),
    Recipe("clip", ("--clip.norm=2",)),  # or what the norms of one-cycle say
    Recipe("accumulate", ("--batch.micro-size=32",)),
    Recipe("bf16", ("--precision.dtype=bf16",), kept=False),
    Recipe("checkpoints", ("--checkpoint.every=50", "--checkpoint.keep=1")),
    # In the middle of the third epoch, of 75 steps.
    Recipe("killed", ("--inject=kill:rank=1:step=187:phase=backward",), kept=False),
    Recipe("decay", ("--optim.weight-decay=0.05",)),
)  # fmt: skip


def command_of(name: str, *, epochs: int, ranks: int, folder: Path, clip: float) -> list[str]:
    """The command of a step: what earlier steps keep, and its own; a later value of a flag wins.

    Args:
        clip: the value from the step `clip` on.
    """
    flags: dict[str, str] = {}
    for recipe in RECIPES:
        if recipe.name == name or recipe.kept:
            flags.update((flag.partition("=")[0], flag) for flag in recipe.flags)
        if recipe.name == "clip" and "--clip.norm" in flags:
            flags["--clip.norm"] = f"--clip.norm={clip:g}"
        if recipe.name == name:
            break
    restarts = ["--max-restarts", "0"] if name == "killed" else []
    return ["-m", "launch", "--nproc-per-node", str(ranks), *restarts, "--", "sample",
            f"--run-dir={folder / name}", f"--epochs={epochs}", *flags.values()]


def lines_of(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps' and the validations' lines of metrics.jsonl."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return ([line for line in lines if "grad_norm" in line],
            [line for line in lines if "val_accuracy" in line])


def seconds(run: Path) -> float:
    """From each attempt's first step to its last event, validations and saves included."""
    times = defaultdict(list)
    for text in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "first-step" or times[event["attempt"]]:
            times[event["attempt"]].append(event["time"])
    return sum(found[-1] - found[0] for found in times.values() if found)


def report(run: Path, epochs: int) -> dict[str, Any]:
    """What a finished run came to."""
    steps, validations = lines_of(run)
    norms = [line["grad_norm"] for line in steps]
    late = norms[len(norms) // 2:]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "test": summary["test"]["accuracy"], "validation": validations[-1]["val_accuracy"],
        "epoch_s": seconds(run) / epochs, "norms": norms, "percentiles": percentiles(late),
        "clipped": {limit: (share(norms, limit), share(late, limit)) for limit in LIMITS},
    }  # fmt: skip


def share(norms: Sequence[float], limit: float) -> float:
    """Of the steps, those that the limit would clip."""
    return sum(norm > limit for norm in norms) / len(norms)


def choose(norms: Sequence[float]) -> float:
    """The least of some round values that clips fewer than 5 % of these steps."""
    return next(v for v in (*LIMITS, 10.0, 20.0, 50.0, float("inf")) if share(norms, v) < ENOUGH)


def percentiles(norms: Sequence[float]) -> dict[int, float]:
    """50, 90, 95 and 99."""
    cuts = statistics.quantiles(norms, n=100, method="inclusive")
    return {p: cuts[p - 1] for p in (50, 90, 95, 99)}


def histogram(norms: Sequence[float], width: int = 40) -> str:
    """Counts of the norms in bins that double, as text."""
    edges = [2.0**n for n in range(-3, 7)]
    counts = [sum(low <= norm < high for norm in norms)
              for low, high in zip([0.0, *edges], [*edges, float("inf")], strict=True)]
    return "\n".join(
        f"  below {edge:>6g}  {'#' * round(width * count / max(counts))} {count}"
        for edge, count in zip([*edges, float("inf")], counts, strict=True) if count)


def draw_norms(norms: Sequence[float], chosen: float, path: Path) -> None:
    """The norms over the steps, and how often each occurs."""
    plt = _pyplot()
    figure, (over, often) = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
    over.semilogy(range(1, len(norms) + 1), norms, ".", markersize=3)
    often.hist(norms[len(norms) // 2:], bins=40, orientation="horizontal")
    for axis in (over, often):
        axis.axhline(chosen, color="tab:red", label=f"clip at {chosen:g}")
    over.set(xlabel="step", ylabel="gradient norm")
    often.set(xlabel="steps of the second half")
    often.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def draw_curve(run: Path, killed_at: int, path: Path) -> None:
    """Accuracy of one run that two attempts made."""
    plt = _pyplot()
    steps, validations = lines_of(run)
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for after, name, colour in ((False, "until the kill", "tab:blue"),
                                (True, "resumed", "tab:orange")):
        own = [line for line in steps if (line["step"] > killed_at) == after]
        axis.plot([line["step"] for line in own], [line["accuracy"] for line in own],
                  color=colour, alpha=0.4, label=f"batches, {name}")
    axis.plot([line["step"] for line in validations],
              [line["val_accuracy"] for line in validations], "ko-", label="validation")
    axis.axvline(killed_at, color="tab:red", linestyle=":", label=f"killed after {killed_at}")
    axis.set(xlabel="step", ylabel="accuracy")
    axis.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row a step of the lab."""
    header = ["step", "test", "validation", "s an epoch",
              *[f"> {limit:g}: all / late" for limit in LIMITS], "95th, 99th percentile, late"]
    return reporting.table(header, [
        [name, f"{r['test']:.3f}", f"{r['validation']:.3f}", f"{r['epoch_s']:.1f}",
         *[f"{all_:.0%} / {late:.0%}".replace("%", " %") for all_, late in r["clipped"].values()],
         f"{r['percentiles'][95]:.2f}, {r['percentiles'][99]:.2f}"]
        for name, r in found.items()])


def main() -> None:
    """Run the steps in turn, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="of each run (4), 3 or more")
    parser.add_argument("--ranks", type=int, default=2, help="of each run (2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/lab"), help="of the runs")
    parser.add_argument("--steps", default=",".join(r.name for r in RECIPES), help="which (all)")
    options = parser.parse_args()
    if options.epochs < 3:
        parser.error("--epochs: 3 or more, since a run is killed in the third")
    machine = reporting.machine()
    print(reporting.describe(machine))
    found: dict[str, dict[str, Any]] = {}
    clip = 2.0
    for name in options.steps.split(","):
        run = options.folder / name
        command = command_of(name, epochs=options.epochs, ranks=options.ranks,
                             folder=options.folder, clip=clip)
        print(f"\n{name}: python {shlex.join(command)}", flush=True)
        ended = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=False)
        if name == "killed":
            killed_at = lines_of(run)[0][-1]["step"]
            print(f"  exit code {ended.returncode} after step {killed_at}; the same command again")
            ended = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL,
                                   check=False)
            draw_curve(run, killed_at, options.folder / "curve.png")
            print(f"  {options.folder / 'curve.png'}")
            if (options.folder / "checkpoints").exists():
                told = list(differences(options.folder / "checkpoints", run))
                print(f"  compared with checkpoints: {told[0] if told else 'same bits'}")
        if ended.returncode:
            raise SystemExit(f"{name} ended with {ended.returncode}")
        found[name] = report(run, options.epochs)
        if name == "one-cycle":
            late = found[name]["percentiles"]
            print(histogram(found[name]["norms"]))
            norms = found[name]["norms"]
            clip = choose(norms[len(norms) // 2:])
            print("  late steps: " + ", ".join(f"{p} % below {v:.2f}" for p, v in late.items())
                  + f"; {clip:g} clips fewer than 5 % of them")
            draw_norms(norms, clip, options.folder / "norms.png")
        if name == "checkpoints":
            kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
            best = json.loads((run / "summary.json").read_text())["best"]["step"]
            print(f"  kept: {', '.join(kept)}; the best is step {best}")
    print("\n" + table(found))
    reporting.print_json("lab", machine=machine, epochs=options.epochs, ranks=options.ranks, steps={
        name: {k: v for k, v in r.items() if k != "norms"} for name, r in found.items()})


if __name__ == "__main__":
    reporting.finish(main)
