"""What share of the time makes new steps if ranks die at random: measured, and forecast.

    python -m benchmarks.goodput [--deaths 11] [--rare-deaths 2] [--rounds 2]

The small CNN on 2 ranks, a random one of which is killed with a mean time between failures of 10
and of 100 times a recovery, compared with undisturbed runs before and after, and with the complete
formula of Daly (2006, eq. 20).
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
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.chaos_run import Launcher
from benchmarks.recovery import output_of
from trainer.storage.layout import EVENTS
from trainer.telemetry.events import read_events

RANKS, EVERY = 2, 100
"""Steps from save to save."""
UNDISTURBED, CALIBRATION, SETTLE_S = 200, 5, 4.0
"""Steps by which the time of a step is measured; deaths by which that of a recovery is, and seconds
between them."""
LIMIT_S = 900.0
POLL_S, IDLE_POLL_S = 0.002, 0.05
SAVE_S = 0.006  # for which a save holds the training


def kill_times(mean_s: float, deaths: int, seed: int) -> list[float]:
    """When ranks die, in seconds: a Poisson process of this mean gap in which there are so many
    deaths in the time that they take on average; each then is equally likely at any instant."""
    draw = random.Random(seed)
    return sorted(draw.uniform(0, mean_s * deaths) for _ in range(deaths))


def run(launcher: Launcher, folder: Path, steps: int, kills_s: Sequence[float]) -> dict[str, Any]:
    """One run; a random rank is killed `kills_s` seconds after its first step.

    Returns:
        seconds from the first step to the end, deaths, and seconds from each death to the next
        first step of an attempt.

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
            "recoveries": [seconds for seconds in back if seconds is not None]}


def _first_steps(events: Path) -> list[float]:
    """When each attempt made its first step."""
    return [event["time"] for event in read_events(events)
            if event["event"] == "first-step" and event["rank"] == 0]


def measure(deaths: dict[int, int], rounds: int, folder: Path) -> dict[str, Any]:
    """The time of a recovery, and the goodput at each MTBF / recovery with its deaths a round."""
    launcher, numbers = Launcher("launch-cold", max_restarts=1000), itertools.count(1)

    def train(steps: int, kills_s: Sequence[float] = ()) -> dict[str, Any]:
        return run(launcher, folder / f"run-{next(numbers)}", steps, kills_s)

    step_s = train(UNDISTURBED)["seconds"] / (UNDISTURBED - 1)
    found = train(math.ceil(SETTLE_S * (CALIBRATION + 1) / step_s),
                  [SETTLE_S * (n + 1) for n in range(CALIBRATION)])
    if not found["recoveries"]:
        raise SystemExit("no death of the calibration was recovered from")
    recovery_s = statistics.median(found["recoveries"])
    sides = [measure_side(train, factor, recovery_s, step_s, count, rounds)
             for factor, count in deaths.items() if count]
    return {"recovery": reporting.summary(found["recoveries"]), "sides": sides}


def daly(mtbf_s: float, restart_s: float, step_s: float, *, steps: int = 1) -> float:
    """The goodput by Daly's complete formula (2006, eq. 20), if `steps` steps are between two
    points to which a failure returns: 1 with saves by survivors, `EVERY` without."""
    piece_s, save_s = steps * step_s, SAVE_S * steps / EVERY
    spent_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((piece_s + save_s) / mtbf_s)
    return piece_s / spent_s


def measure_side(train: Callable[..., dict[str, Any]], factor: int, recovery_s: float,
                 step_s: float, deaths: int, rounds: int) -> dict[str, Any]:
    """The goodput with a mean time between failures of `factor` recoveries, from disturbed runs
    that alternate with undisturbed ones of the same number of steps."""
    mean_s, restart_s = factor * recovery_s, max(0.0, recovery_s - step_s)  # it ends with a step
    steps = math.ceil(deaths * mean_s * daly(mean_s, restart_s, step_s) / step_s)
    ideal, disturbed = [train(steps, ())["seconds"]], []
    for n in range(rounds):
        disturbed.append(train(steps, kill_times(mean_s, deaths, seed=n)))
        ideal.append(train(steps, ())["seconds"])
    seconds, count = (sum(one[name] for one in disturbed) for name in ("seconds", "deaths"))
    actual = seconds / max(1, count), restart_s, statistics.fmean(ideal) / (steps - 1)
    bounds = sorted(sum(side) / seconds for side in (ideal[:-1], ideal[1:]))
    return {"factor": factor, "mtbf_s": mean_s, "deaths": count, "rounds": rounds,
            "seconds": seconds, "steps": rounds * steps, "step_s": actual[2],
            "goodput": [statistics.fmean(bounds), *bounds], "forecast": daly(*actual),
            "forecast_without_survivors": daly(*actual, steps=EVERY)}


def show(found: dict[str, Any]) -> str:
    rows = [[f"{side['factor']} × recovery ({side['mtbf_s']:.1f} s)", f"{side['deaths']}",
             f"{side['rounds']}", f"{side['seconds']:.0f}", f"{side['steps']:,}",
             f"{1e3 * side['step_s']:.1f}",
             reporting.within([100 * share for share in side["goodput"]], ".1f"),
             f"{100 * side['forecast']:.1f}", f"{100 * side['forecast_without_survivors']:.1f}"]
            for side in found["sides"]]
    head = ["MTBF", "deaths", "runs", "in all, s", "steps", "undisturbed step, ms",
            "goodput, % (by undisturbed runs before, after)", "forecast, %",
            "forecast without survivors, %"]
    return (f"recovery: {reporting.spread(found['recovery'], 1e3, 0)} ms, n = "
            f"{found['recovery']['n']}\n{reporting.table(head, rows)}\n")


def main() -> None:
    parser = reporting.parser("goodput", __doc__)
    parser.add_argument("--deaths", type=int, default=11, help="at 10 × recovery (%(default)s)")
    parser.add_argument("--rare-deaths", type=int, default=2, help="at 100 × (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="disturbed runs (%(default)s)")
    options = parser.parse_args()
    machine = reporting.machine()
    deaths = {10: options.deaths, 100: options.rare_deaths}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(deaths, options.rounds, Path(folder))
    print(show(found), flush=True)
    reporting.print_json("goodput", machine=machine, measured=found)


if __name__ == "__main__":
    reporting.finish(main)
