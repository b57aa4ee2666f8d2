"""How much of the time goes into new steps where ranks die at random: measured, forecast, scaled.

    python -m benchmarks.goodput [--quick] [--parts measure,scale] [--plot FILE] [--json]

measure   The small CNN on the bundled sample, 2 ranks, under `python -m launch`. A first run tells
          how long a recovery takes (R: from SIGKILL to the next new step). Then runs in which a
          random rank is killed from outside at random times (exponential gaps), with a mean of 10 R
          and of 100 R, cut into slices of 40 s or so, with an undisturbed run of as many steps
          before and after each. Goodput: the seconds that the same steps take undisturbed / the
          seconds that they took. Where other work slows the machine down in one of the runs, that
          says little; so also 1 - the share of the time from deaths to the next first steps, which
          needs no second run. Beside it what Daly's formula says for the same costs and the
          failures that there were, with survivors' saves.
scale     A simulation, from the measured costs, of data-parallel jobs on 1,024 to 131,072 GPUs at
          published failure rates, with and without survivors' saves. Restarts and saves on such
          machines have not been measured here: they are arguments.

Failures per 1,000 node-days (8 GPUs a node): 6.5 on Meta's cluster RSC-1 (Kokolis et al. 2025,
"Revisiting Reliability in Large-Scale Machine Learning Research Clusters", arXiv 2410.21680, whose
projections of 1.8 h at 16,384 and 0.23 h at 131,072 GPUs follow from it; at 1,024 GPUs 7.9 h were
observed, which is 4 times as often); 3.8 in the pre-training of Llama 3 405B (419 unexpected
interruptions in 54 days of 16,384 GPUs, arXiv 2407.21783).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.chaos_run import Launcher
from benchmarks.goodput_model import Costs, daly, mtbf_s, simulate, young
from benchmarks.recovery import output_of

RANKS = 2
GPUS = (1024, 16384, 131072)
RATES = {"RSC-1": 6.5, "Llama 3": 419 / 54 / (16384 / 8) * 1000}
"""Failures per 1,000 node-days."""
WANTED = {100: 0.97, 10: 0.80}
"""MTBF / recovery → the least goodput."""
CALIBRATION = 5
"""Deaths by which the time of a recovery is measured."""
LIMIT_S = 900.0
PARTS = ("measure", "scale")
THREADS = 1
POLL_S, IDLE_POLL_S = 0.002, 0.05


def kill_times(mean_s: float, deaths: int, seed: int) -> list[float]:
    """When ranks die, in seconds: a Poisson process of this mean gap in which there are so many
    deaths in the time that they take on average; each then is equally likely at any instant."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0, mean_s * deaths) for _ in range(deaths))


def run(
    launcher: Any, folder: Path, steps: int, every: int, kills_s: Sequence[float] = (),
) -> dict[str, Any]:
    """One run; a random rank is killed `kills_s` seconds after its first step.

    Returns:
        seconds from the first step to the end, deaths, and seconds from each to the next first step
        of an attempt.

    Raises:
        SystemExit: it didn't end in time, or not as it should.
    """
    from trainer.storage.layout import EVENTS
    from trainer.telemetry.events import read_events

    arguments = ["sample", "--run-dir", str(folder), f"--steps={steps}", "--eval.every=off",
                 f"--checkpoint.every={every}", "--restart.max-same-step=1000",
                 "--log.level=error", f"--world.threads={THREADS}"]
    shown, events = folder.with_suffix(".log"), folder / EVENTS
    pid = launcher.start(RANKS, arguments, shown)
    draw, left, killed, first = random.Random(steps), list(kills_s), list[float](), 0.0
    deadline_s = time.monotonic() + LIMIT_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline_s:
            os.killpg(pid, signal.SIGKILL)
            raise SystemExit(f"not complete after {LIMIT_S:.0f} s\n{output_of(shown)}")
        if not first:
            first = _first_step_at(read_events(events))
        elif left and time.time() >= first + left[0] and (ranks := launcher.ranks(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                killed.append(time.time())
            del left[0]
        time.sleep(POLL_S if first else IDLE_POLL_S)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"exit code {code}\n{output_of(shown)}")
    told = read_events(events)
    begin, end = _first_step_at(told), max(e["time"] for e in told if e["event"] == "end")
    starts = [e["time"] for e in told if e["event"] == "first-step" and e["rank"] == 0]
    back = [next((at - kill for at in starts if at > kill), None) for kill in killed]
    return {"seconds": end - begin, "deaths": len(killed),
            "standing_s": standing(killed, starts),
            "recoveries": [seconds for seconds in back if seconds is not None]}


def standing(kills: Sequence[float], starts: Sequence[float]) -> float:
    """Seconds from deaths to the next first steps; what several deaths share counts once."""
    whole = until = 0.0
    for kill in kills:
        back = next((at for at in starts if at > kill), kill)
        whole += max(0.0, back - max(kill, until))
        until = max(until, back)
    return whole


def _first_step_at(events: list[dict[str, Any]]) -> float:
    return next((e["time"] for e in events if e["event"] == "first-step" and e["rank"] == 0), 0.0)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The time of a recovery, of a step and of a save, and the goodput at each MTBF."""
    launcher = Launcher("launch-cold", max_restarts=1000)

    def undisturbed(steps: int) -> float:
        """Seconds a step; the end of the run, with validation and test, is a part of it."""
        nonlocal count
        count += 1
        found = run(launcher, folder / f"run-{count}", steps, options.every)
        return found["seconds"] / (steps - 1)

    def disturbed(steps: int, kills_s: Sequence[float]) -> dict[str, Any]:
        nonlocal count
        count += 1
        return run(launcher, folder / f"run-{count}", steps, options.every, kills_s)

    count = 0
    step_s = undisturbed(options.steps)
    kills_s = [options.settle * (n + 1) for n in range(CALIBRATION)]
    found = disturbed(math.ceil(options.settle * (CALIBRATION + 1) / step_s), kills_s)
    if not found["recoveries"]:
        raise SystemExit("no death of the calibration was recovered from")
    recovery_s = statistics.median(found["recoveries"])
    step_s, sides = undisturbed(options.steps), []
    for factor, deaths in ((10, options.deaths), (100, options.rare_deaths)):
        if not deaths:
            continue
        mean_s = factor * recovery_s
        # A recovery ends with a step, which is work.
        costs = Costs(step_s=step_s, interval_s=options.every * step_s,
                      save_s=options.save_s, restart_s=max(0.0, recovery_s - step_s))
        slices = max(1, round(deaths * mean_s / options.slice_s))
        slice_s = deaths * mean_s / slices
        steps = math.ceil(slice_s * daly(costs, mean_s) / step_s)
        kills_s = kill_times(mean_s, deaths, options.seed)
        times, parts = [undisturbed(steps)], list[dict[str, Any]]()
        for n in range(slices):
            parts.append(disturbed(steps, [at - n * slice_s for at in kills_s
                                           if n * slice_s <= at < (n + 1) * slice_s]))
            times.append(undisturbed(steps))
        whole = {name: sum(part[name] for part in parts)
                 for name in ("seconds", "deaths", "standing_s")}
        ideal = [(steps - 1) * sum(side) for side in (times[:-1], times[1:])]
        real_mtbf_s = whole["seconds"] / max(1, whole["deaths"])
        costs = dataclasses.replace(costs, step_s=statistics.fmean(times))
        recoveries = [seconds for part in parts for seconds in part["recoveries"]]
        sides.append(whole | {
            "factor": factor, "mtbf_s": mean_s, "steps": slices * steps, "slices": slices,
            "mtbf_was_s": real_mtbf_s, "step_s": times,
            "goodput": statistics.fmean(ideal) / whole["seconds"],
            "goodput_in_run": 1 - whole["standing_s"] / whole["seconds"],
            "goodput_bounds": [value / whole["seconds"] for value in sorted(ideal)],
            "forecast": daly(costs, real_mtbf_s),
            "forecast_without_survivors": daly(dataclasses.replace(costs, survivors=False),
                                               real_mtbf_s),
            "recovery": reporting.summary(recoveries) if recoveries else None,
        })  # fmt: skip
    return {"recovery": reporting.summary(found["recoveries"]), "save_every": options.every,
            "sides": sides}


def show_measured(found: dict[str, Any]) -> str:
    rows = []
    for side in found["sides"]:
        low, high = side["goodput_bounds"]
        rows.append([
            f"{side['factor']} × recovery", f"{side['mtbf_s']:.1f}", f"{side['deaths']}",
            f"{side['seconds']:.0f}", f"{side['slices']}", f"{side['steps']:,}",
            f"{100 * side['goodput']:.1f} ({100 * low:.1f} – {100 * high:.1f})",
            f"{100 * side['goodput_in_run']:.1f}", f"{100 * side['forecast']:.1f}",
            f"{100 * side['forecast_without_survivors']:.1f}",
            f"{100 * WANTED[side['factor']]:.0f}",
        ])  # fmt: skip
    head = ["MTBF", "s", "deaths", "run, s", "slices", "steps",
            "goodput, % (by undisturbed runs before, after)", "without standing, %",
            "forecast, %", "forecast, no survivors, %", "wanted, %"]
    times = ", ".join(f"{1e3 * s:.1f}" for side in found["sides"] for s in side["step_s"])
    return (f"recovery: {reporting.spread(found['recovery'], 1e3, 0)} ms, n = "
            f"{found['recovery']['n']}; undisturbed: {times} ms a step; a save every "
            f"{found['save_every']} steps\n{reporting.table(head, rows)}")


def scale(options: argparse.Namespace, recovery_s: float | None) -> list[dict[str, Any]]:
    """The simulated goodput, for each number of GPUs, failure rate and time of a restart."""
    restarts = [*([recovery_s] if recovery_s else []), *options.restart_s]
    found = []
    for name, rate in RATES.items():
        for gpus in GPUS:
            mtbf = mtbf_s(gpus, failures_per_1000_node_days=rate)
            least = max(young(options.save_s, mtbf), options.durable_s)
            interval_s = options.step_s * math.ceil(least / options.step_s)
            for restart_s in restarts:
                costs = Costs(step_s=options.step_s, interval_s=interval_s, save_s=options.save_s,
                              durable_s=options.durable_s, restart_s=restart_s)
                on, off = (simulate(dataclasses.replace(costs, survivors=kept), mtbf,
                                    failures=options.failures, seed=options.seed)
                           for kept in (True, False))
                found.append({"rate": name, "failures_per_1000_node_days": rate, "gpus": gpus,
                              "mtbf_s": mtbf, "interval_s": interval_s, "restart_s": restart_s,
                              "on": on, "off": off, "daly_on": daly(costs, mtbf)})
    return found


def show_scaled(found: list[dict[str, Any]], options: argparse.Namespace) -> str:
    rows = [[f"{f['rate']} ({f['failures_per_1000_node_days']:.1f})", f"{f['gpus']:,}",
             f"{f['mtbf_s'] / 60:,.1f}", f"{f['interval_s']:,.0f}", f"{f['restart_s']:.1f}",
             f"{100 * f['on']:.1f}", f"{100 * f['off']:.1f}"] for f in found]
    head = ["failures per 1,000 node-days", "GPUs", "MTBF, min", "save every, s", "restart, s",
            "survivors save, %", "they don't, %"]
    return (f"simulated, {options.failures:,} failures each: a step takes {options.step_s:g} s, a "
            f"save holds for {options.save_s:g} s and is durable after {options.durable_s:g} s\n"
            f"{reporting.table(head, rows)}")


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Goodput over the number of GPUs, into a file."""
    from matplotlib.figure import Figure

    restarts = sorted({f["restart_s"] for f in found})
    figure = Figure(figsize=(4.5 * len(restarts), 4), layout="constrained")
    axes = figure.subplots(1, len(restarts), squeeze=False, sharey=True)[0]
    for axis, restart_s in zip(axes, restarts, strict=True):
        for colour, name in zip(("C0", "C1"), RATES, strict=True):
            lines = [f for f in found if (f["restart_s"], f["rate"]) == (restart_s, name)]
            for key, style, text in (("on", "-", "survivors save"), ("off", "--", "they don't")):
                axis.plot([f["gpus"] for f in lines], [100 * f[key] for f in lines], style,
                          color=colour, marker="o", label=f"{name}: {text}")
        axis.set(xscale="log", xlabel="GPUs", title=f"a restart takes {restart_s:.3g} s")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("goodput, %")
    axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="(%(default)s)")
    parser.add_argument("--deaths", type=int, default=11, help="at 10 × recovery (%(default)s)")
    parser.add_argument("--rare-deaths", type=int, default=2, help="at 100 × (%(default)s)")
    parser.add_argument("--steps", type=int, default=400,
                        help="of the runs that tell how long a step takes (%(default)s)")
    parser.add_argument("--slice-s", type=float, default=40.0,
                        help="seconds of a disturbed run, about (%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps a save (%(default)s)")
    parser.add_argument("--settle", type=float, default=4.0,
                        help="seconds from death to death where a recovery is timed (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--step-s", type=float, default=5.0,
                        help="simulated: of a step (%(default)s)")
    parser.add_argument("--save-s", type=float, default=0.006,
                        help="for which a save holds the training (%(default)s)")
    parser.add_argument("--durable-s", type=float, default=30.0,
                        help="simulated: until a save can be used (%(default)s)")
    parser.add_argument("--restart-s", default="60,300",
                        help="simulated: seconds of a restart, beside the measured one "
                        "(%(default)s)")
    parser.add_argument("--failures", type=int, default=20_000, help="simulated (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the simulated goodput")
    parser.add_argument("--quick", action="store_true", help="10 deaths at 10 × recovery only")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib isn't installed (pip install matplotlib)")
    options.restart_s = [float(text) for text in options.restart_s.split(",")]
    if options.quick:
        options.deaths, options.rare_deaths, options.steps = 10, 0, 100
    machine = reporting.machine()
    say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))
    say(reporting.describe(machine) + f"; {RANKS} ranks\n")
    found: dict[str, Any] = {}
    if "measure" in parts:
        with tempfile.TemporaryDirectory() as folder:
            found["measured"] = measure(options, Path(folder))
        say(show_measured(found["measured"]) + "\n")
    if "scale" in parts:
        recovery_s = found["measured"]["recovery"]["median"] if "measured" in found else None
        found["scaled"] = scale(options, recovery_s)
        say(show_scaled(found["scaled"], options) + "\n")
        if options.plot:
            plot(found["scaled"], options.plot)
    reporting.print_json("goodput", machine=machine, **found)


if __name__ == "__main__":
    reporting.finish(main)
