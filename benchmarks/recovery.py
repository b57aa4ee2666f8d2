"""How long a run stands still when a rank dies: from the SIGKILL to the next new step.

    python -m benchmarks.recovery [--repeats 20] [--torchrun-repeats 5] [--json]

The small CNN on the bundled sample trains on two ranks. At every tenth step the state is saved. Two
steps later, with that save safe on the disk and one step old, a rank is killed: the first and the
last in turn. Under `python -m launch`, and under plain torchrun for comparison. The phases are
those that events.jsonl tells of rank 0; `stop` includes the survivor's save, if it makes one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import reporting
from trainer.folder import EVENTS, METRICS
from trainer.log import read_events
from trainer.metrics import read_metrics

EVERY = 10
SETTLE_S = 1.0
"""For how long a rank stands still before it is killed, so that the save before has ended."""

POLL_S = 0.005
DEADLINE_S = 120.0
"""For a launch to begin, and for each recovery."""

PHASES = {
    "detect": ("kill", "stop"), "stop": ("stop", "rendezvous"),
    "rendezvous": ("rendezvous", "fork"), "fork": ("fork", "start"), "start": ("start", "join"),
    "process group": ("join", "build"), "build": ("build", "warm-up"),
    "warm-up": ("warm-up", "restore"), "restore": ("restore", "train"),
    "first batch and step": ("train", "first-step"), "next step": ("first-step", "new-step"),
}  # fmt: skip
"""Phase → what it begins and ends with."""

WHOLE = "kill → next new step"
COLD_PHASES = {"new processes": ("kill", "start")}
"""What plain torchrun spends instead of the phases before `start`."""


def command(launcher: str, ranks: int) -> list[str]:
    """The launcher's part of the command line."""
    if launcher == "launch":
        return [sys.executable, "-m", "launch", f"--nproc-per-node={ranks}", "--max-restarts=3",
                "--"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={ranks}", "--max-restarts=1000", "-m", "trainer"]


def measure(launcher: str, ranks: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Kill a rank `repeats` times in one run; when everything happened, for each death."""
    run = folder / launcher
    deaths = [(EVERY * (number + 1) + 2, number % 2 * (ranks - 1)) for number in range(repeats)]
    faults = [f"--inject={kind}:rank={rank}:step={step}" for step, rank in deaths
              for kind in (f"slow:seconds={SETTLE_S}", "kill")]
    name = "--run" if launcher == "launch" else "--run-dir"
    arguments = ["sample", name, str(run), f"--steps={deaths[-1][0] + 1}", "--eval.every=off",
                 f"--checkpoint.every={EVERY}", *faults]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / f"{launcher}.txt").open("wb") as output:
        process = subprocess.Popen(
            [*command(launcher, ranks), *arguments], stdout=output, stderr=output,
            process_group=0, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        try:
            # Lines are seen when they appear: a step has no other time stamp.
            made = [wait_for_step(run / METRICS, step, process) for step, _ in deaths]
            process.wait(DEADLINE_S)
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{output_of(folder / f'{launcher}.txt')}") from error
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    events = read_events(run / EVENTS)
    kills = [e["time"] for e in events if e["event"] == "fault" and e["fault"].startswith("kill")]
    firsts = [e for e in events if e["event"] == "first-step" and e["rank"] == 0][1:]
    if not len(kills) == len(firsts) == repeats:
        raise SystemExit(f"{len(kills)} kills and {len(firsts)} restarts instead of {repeats}\n"
                         + output_of(folder / f"{launcher}.txt"))
    return [
        {"kill": kill, **first["entered"], "first-step": first["time"], "new-step": new,
         "cpu_s": first["cpu_s"], "redone": death - first["step"]}
        for kill, first, new, (death, _) in zip(kills, firsts, made, deaths, strict=True)
    ]  # fmt: skip


def wait_for_step(path: Path, step: int, process: subprocess.Popen[bytes]) -> float:
    """When the line of a step was there, in seconds since the epoch."""
    deadline, size = time.monotonic() + DEADLINE_S, -1
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            size, now = found, time.time()
            if any(line["step"] == step for line in read_metrics(path)):
                return now
        if ended:
            break
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was not made")


def output_of(path: Path) -> str:
    """The last lines that a launch has shown."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:])


def summarise(found: list[dict[str, Any]], phases: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Medians and spread of each phase and of the whole, in seconds."""
    spans = {WHOLE: ("kill", "new-step"), **phases}
    return {
        "seconds": {name: reporting.summary([death[end] - death[begin] for death in found])
                    for name, (begin, end) in spans.items()},
        "rank_0_cpu_s": reporting.summary([death["cpu_s"] for death in found]),
        "steps_redone": reporting.summary([death["redone"] for death in found]),
    }  # fmt: skip


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name in (WHOLE, *COLD_PHASES, *PHASES):
        row = [name]
        for side in found.values():
            values = side["seconds"].get(name)
            row.append("" if values is None else reporting.spread(values, 1e3, 0))
        rows.append(row)
    rows.append(["processor time of rank 0",
                 *(reporting.spread(side["rank_0_cpu_s"], 1e3, 0) for side in found.values())])
    rows.append(["steps redone",
                 *(f"{side['steps_redone']['median']:.0f}" for side in found.values())])
    rows.append(["n", *(str(side["rank_0_cpu_s"]["n"]) for side in found.values())])
    head = ["ms, median (quartiles)", *found]
    return reporting.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=20, help="deaths under launch (%(default)s)")
    parser.add_argument("--torchrun-repeats", type=int, default=5,
                        help="deaths under torchrun, 0: leave it out (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    machine = reporting.machine()
    found: dict[str, dict[str, Any]] = {}
    warm = dict(PHASES)
    cold = {**COLD_PHASES, **dict(list(PHASES.items())[list(PHASES).index("start"):])}
    with tempfile.TemporaryDirectory() as name:
        for launcher, repeats, phases in (
            ("launch", options.repeats, warm), ("torchrun", options.torchrun_repeats, cold),
        ):  # fmt: skip
            if repeats:
                deaths = measure(launcher, options.ranks, repeats, Path(name))
                found[launcher] = summarise(deaths, phases)
    if not options.json:
        print(reporting.describe(machine) + f"; {options.ranks} ranks\n")
        print(show(found) + "\n")
    reporting.print_json("recovery", machine=machine, ranks=options.ranks, launchers=found)


if __name__ == "__main__":
    main()
