"""What share of the time makes new steps if ranks die at random: measured, forecast, simulated.

    python -m benchmarks.goodput [--quick] [--parts measure,scale]

measure   The small CNN on 2 ranks, a random one of which is killed with a mean time between
          failures of 10 and of 100 times a recovery, compared with undisturbed runs before and
          after, and with Daly's formula.
scale     A simulation of jobs on up to 131,072 GPUs at published failure rates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.chaos_run import Launcher
from benchmarks.goodput_model import Costs, daly, mtbf_s, simulate, young
from benchmarks.recovery import output_of
from trainer.storage.layout import EVENTS
from trainer.telemetry.events import read_events

RANKS = 2
EVERY, SLICE_S = 100, 40.0
"""Steps from save to save; about the seconds of a disturbed run."""
CALIBRATION, SETTLE_S = 5, 4.0
"""Deaths by which the time of a recovery is measured, and seconds between them."""
WANTED = {10: 0.80, 100: 0.97}
"""MTBF / recovery → the least goodput."""
LIMIT_S = 900.0
PARTS = ("measure", "scale")
POLL_S, IDLE_POLL_S = 0.002, 0.05

GPUS = (1024, 16384, 131072)
RATES = {"RSC-1": 6.5, "Llama 3": 419 / 54 / (16384 / 8) * 1000}
"""Failures per 1,000 node-days (arXiv 2410.21680, 2407.21783)."""
SAVE_S = 0.006
"""For which a save holds the training."""
STEP_S, DURABLE_S, RESTARTS_S, FAILURES = 5.0, 30.0, (60.0, 300.0), 20_000
"""Simulated: time of a step, time until a save can be used, times of a restart; failures."""

Trainer = Callable[[int, Sequence[float]], dict[str, Any]]
"""Makes a run of this many steps, in which ranks die at these seconds."""


def kill_times(mean_s: float, deaths: int, seed: int) -> list[float]:
    """When ranks die, in seconds: a Poisson process of this mean gap in which there are so many
    deaths in the time that they take on average; each then is equally likely at any instant."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0, mean_s * deaths) for _ in range(deaths))


def run(launcher: Launcher, folder: Path, steps: int, kills_s: Sequence[float]) -> dict[str, Any]:
    """One run; a random rank is killed `kills_s` seconds after its first step.

    Returns:
        seconds from the first step to the end, deaths, seconds that the run stood still, and
        seconds from each death to the next first step of an attempt.

    Raises:
        SystemExit: it did not end in time, or failed.
    """
    arguments = ["sample", "--run-dir", str(folder), f"--steps={steps}", "--eval.every=off",
                 f"--checkpoint.every={EVERY}", "--restart.max-same-step=1000",
                 "--log.level=error", "--world.threads=1"]
    shown, events = folder.with_suffix(".log"), folder / EVENTS
    pid = launcher.start(RANKS, arguments, shown)
    draw, left, killed, first = random.Random(steps), list(kills_s), list[float](), 0.0
    deadline_s = time.monotonic() + LIMIT_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline_s:
            os.killpg(pid, signal.SIGKILL)
            raise SystemExit(f"not complete after {LIMIT_S:.0f} s\n{output_of(shown)}")
        if not first:
            first = next(iter(_first_steps(events)), 0.0)
        elif left and time.time() >= first + left[0] and (ranks := launcher.ranks(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
                killed.append(time.time())
            del left[0]
        time.sleep(POLL_S if first else IDLE_POLL_S)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(f"exit code {code}\n{output_of(shown)}")
    starts = _first_steps(events)
    end = max(event["time"] for event in read_events(events) if event["event"] == "end")
    back = [next((at - kill for at in starts if at > kill), None) for kill in killed]
    return {"seconds": end - starts[0], "deaths": len(killed),
            "standing_s": standing(killed, starts),
            "recoveries": [seconds for seconds in back if seconds is not None]}


def standing(kills: Sequence[float], starts: Sequence[float]) -> float:
    """Seconds from deaths to the next first steps; time that several deaths share counts once."""
    whole = until = 0.0
    for kill in kills:
        back = next((at for at in starts if at > kill), kill)
        whole += max(0.0, back - max(kill, until))
        until = max(until, back)
    return whole


def _first_steps(events: Path) -> list[float]:
    """When each attempt made its first step."""
    return [event["time"] for event in read_events(events)
            if event["event"] == "first-step" and event["rank"] == 0]


def measure(deaths: dict[int, int], steps: int, folder: Path) -> dict[str, Any]:
    """The time of a recovery, and the goodput at each MTBF / recovery with its number of deaths."""
    launcher, numbers = Launcher("launch-cold", max_restarts=1000), itertools.count(1)

    def train(steps: int, kills_s: Sequence[float] = ()) -> dict[str, Any]:
        return run(launcher, folder / f"run-{next(numbers)}", steps, kills_s)

    step_s = _step_s(train, steps)
    found = train(math.ceil(SETTLE_S * (CALIBRATION + 1) / step_s),
                  [SETTLE_S * (n + 1) for n in range(CALIBRATION)])
    if not found["recoveries"]:
        raise SystemExit("no death of the calibration was recovered from")
    recovery_s, step_s = statistics.median(found["recoveries"]), _step_s(train, steps)
    # A recovery ends with a step, which is work.
    costs = Costs(step_s=step_s, interval_s=EVERY * step_s, save_s=SAVE_S,
                  restart_s=max(0.0, recovery_s - step_s))
    sides = [measure_side(train, factor, factor * recovery_s, count, costs)
             for factor, count in deaths.items() if count]
    return {"recovery": reporting.summary(found["recoveries"]), "sides": sides}


def _step_s(train: Trainer, steps: int) -> float:
    """Seconds per step undisturbed, the end of the run with validation and test included."""
    return train(steps, ())["seconds"] / (steps - 1)


def measure_side(train: Trainer, factor: int, mean_s: float, deaths: int, costs: Costs
                 ) -> dict[str, Any]:
    """The goodput with a mean time between failures of `factor` recoveries, `mean_s`."""
    slices = max(1, round(deaths * mean_s / SLICE_S))
    slice_s = deaths * mean_s / slices
    steps = math.ceil(slice_s * daly(costs, mean_s) / costs.step_s)
    kills_s = kill_times(mean_s, deaths, seed=0)
    times, parts = [_step_s(train, steps)], list[dict[str, Any]]()
    for n in range(slices):
        parts.append(train(steps, [at - n * slice_s for at in kills_s
                                   if n * slice_s <= at < (n + 1) * slice_s]))
        times.append(_step_s(train, steps))
    seconds, count, standing_s = (sum(part[name] for part in parts)
                                  for name in ("seconds", "deaths", "standing_s"))
    ideal = sorted((steps - 1) * sum(side) for side in (times[:-1], times[1:]))
    actual_mtbf_s = seconds / max(1, count)
    costs = replace(costs, step_s=statistics.fmean(times))
    return {
        "factor": factor, "mtbf_s": mean_s, "deaths": count, "slices": slices, "seconds": seconds,
        "steps": slices * steps, "step_s": times, "goodput": statistics.fmean(ideal) / seconds,
        "goodput_bounds": [value / seconds for value in ideal],
        "not_recovering": 1 - standing_s / seconds, "forecast": daly(costs, actual_mtbf_s),
        "forecast_without_survivors": daly(replace(costs, survivors=False), actual_mtbf_s),
    }  # fmt: skip


def show_measured(found: dict[str, Any]) -> str:
    rows = []
    for side in found["sides"]:
        rows.append([
            f"{side['factor']} × recovery ({side['mtbf_s']:.1f} s)", f"{side['deaths']}",
            f"{side['slices']}", f"{side['seconds']:.0f}", f"{side['steps']:,}",
            reporting.within([100 * share for share in (side["goodput"], *side["goodput_bounds"])],
                             ".1f"),
            *(f"{100 * side[name]:.1f}" for name in ("not_recovering", "forecast",
                                                     "forecast_without_survivors")),
            f"{100 * WANTED[side['factor']]:.0f}",
        ])  # fmt: skip
    head = ["MTBF", "deaths", "slices", "run, s", "steps",
            "goodput, % (by undisturbed runs before, after)", "not recovering, %", "forecast, %",
            "forecast without survivors, %", "wanted, %"]
    times = ", ".join(f"{1e3 * s:.1f}" for side in found["sides"] for s in side["step_s"])
    return (f"recovery: {reporting.spread(found['recovery'], 1e3, 0)} ms, n = "
            f"{found['recovery']['n']}; undisturbed: {times} ms per step\n"
            f"{reporting.table(head, rows)}\n")


def scale(restarts_s: Sequence[float]) -> list[dict[str, Any]]:
    """The simulated goodput for each failure rate, number of GPUs and time of a restart."""
    found = []
    for name, rate in RATES.items():
        for gpus in GPUS:
            mtbf = mtbf_s(gpus, failures_per_1000_node_days=rate)
            interval_s = STEP_S * math.ceil(max(young(SAVE_S, mtbf), DURABLE_S) / STEP_S)
            for restart_s in restarts_s:
                costs = Costs(step_s=STEP_S, interval_s=interval_s, save_s=SAVE_S,
                              durable_s=DURABLE_S, restart_s=restart_s)
                survive, die = (simulate(replace(costs, survivors=kept), mtbf, failures=FAILURES)
                                for kept in (True, False))
                found.append({"rate": f"{name} ({rate:.1f})", "gpus": gpus, "mtbf_s": mtbf,
                              "interval_s": interval_s, "restart_s": restart_s,
                              "survivors_save": survive, "they_do_not": die})
    return found


def show_scaled(found: list[dict[str, Any]]) -> str:
    rows = [[f["rate"], f"{f['gpus']:,}", f"{f['mtbf_s'] / 60:,.1f}", f"{f['interval_s']:,.0f}",
             f"{f['restart_s']:.1f}", f"{100 * f['survivors_save']:.1f}",
             f"{100 * f['they_do_not']:.1f}"] for f in found]
    head = ["failures per 1,000 node-days", "GPUs", "MTBF, min", "save every, s", "restart, s",
            "survivors save, %", "they do not, %"]
    return (f"simulated, {FAILURES:,} failures each: a step takes {STEP_S:g} s, a save holds the "
            f"training for {SAVE_S:g} s and is durable after {DURABLE_S:g} s\n"
            f"{reporting.table(head, rows)}\n")


def main() -> None:
    parser = reporting.parser("goodput", __doc__)
    parser.add_argument("--parts", type=reporting.some_of(PARTS), default=",".join(PARTS),
                        help="(%(default)s)")
    parser.add_argument("--deaths", type=int, default=11, help="at 10 × recovery (%(default)s)")
    parser.add_argument("--rare-deaths", type=int, default=2, help="at 100 × (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="10 deaths at 10 × recovery only")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": reporting.machine()}
    restarts_s = list(RESTARTS_S)
    if "measure" in options.parts:
        deaths, steps = ({10: 10}, 100) if options.quick else (
            {10: options.deaths, 100: options.rare_deaths}, 400)
        with tempfile.TemporaryDirectory() as folder:
            found["measured"] = measure(deaths, steps, Path(folder))
        print(show_measured(found["measured"]), flush=True)
        restarts_s.insert(0, found["measured"]["recovery"]["median"])
    if "scale" in options.parts:
        found["scaled"] = scale(restarts_s)
        print(show_scaled(found["scaled"]))
    reporting.print_json("goodput", **found)


if __name__ == "__main__":
    reporting.finish(main)
