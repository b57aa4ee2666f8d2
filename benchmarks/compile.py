"""How long compiled code makes a run wait for its first step: cold, from the kept cache, restarted.

    python -m benchmarks.compile [--repeats N] [--argument WORD …] [--quick] [--json]

One rank under `python -m launch` on the small CNN, `--precision.compile on`. In each repeat:

off       a new run without compiling
cold      a new run; the cache of compiled code is empty
restart   the same run: its rank is killed at step 3, and the launcher starts it again
warm      the same command again after the run was stopped: new processes, the cache kept

Seconds from the start of the command (restart: from the kill) to the first step, and of them those
of the warm-up, in which the code is compiled or loaded. New files in the cache tell whether
anything was compiled once more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.turns import ratios

NAMES = ("off", "cold", "restart", "warm")
KILLED, STOPPED, STEPS = 3, 6, 8
WANTED = 5.0
LIMIT_S = 600.0
CODE = (".so", ".cpp", ".py", ".cubin")


def launch(run: Path, *arguments: str) -> float:
    """Give the command; when that was, in seconds since the epoch.

    Raises:
        SystemExit: it ended neither complete (0) nor stopped (75).
    """
    command = [sys.executable, "-m", "launch", "--nproc-per-node=1", "--max-restarts=2", "--",
               *arguments, "--run-dir", str(run), f"--steps={STEPS}", "--eval.every=off",
               "--log.level=error"]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # it would be used in place of the run's own
    began = time.time()
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S)
    if ended.returncode not in (0, 75):
        raise SystemExit(f"exit code {ended.returncode}\n"
                         + (ended.stdout + ended.stderr).decode(errors="replace")[-3000:])
    return began


def code_in(cache: Path, until: float) -> set[Path]:
    """The files of compiled code that were written by then."""
    return {path for path in cache.rglob("*")
            if path.suffix in CODE and path.stat().st_mtime < until}


def measure(folder: Path, arguments: list[str]) -> dict[str, dict[str, float]]:
    """One repeat: for each, seconds to the first step, those of the warm-up, new files."""
    from trainer.storage.layout import COMPILED, EVENTS
    from trainer.telemetry.events import read_events

    def told(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        events = read_events(run / EVENTS)
        return ([e for e in events if e["event"] == "first-step"],
                [e for e in events if e["event"] == "fault" and e["fault"].startswith("kill")])

    def times(first: dict[str, Any], began: float, new: int) -> dict[str, float]:
        entered = first["entered"]
        warm = entered.get("restore", entered["train"]) - entered["warm-up"]
        return {"seconds": first["time"] - began, "warm-up": warm, "new_files": new}

    plain, run = folder / "off", folder / "on"
    began = launch(plain, *arguments, "--precision.compile=off", f"--inject=term:step={KILLED}")
    found = {"off": times(told(plain)[0][0], began, 0)}
    # The first launch: cold, killed, restarted, stopped.
    arguments = [*arguments, "--precision.compile=on", f"--inject=kill:step={KILLED}",
                 f"--inject=term:step={STOPPED}"]
    cache = run / COMPILED
    began = launch(run, *arguments)
    firsts, kills = told(run)
    made = code_in(cache, kills[0]["time"])
    found["cold"] = times(firsts[0], began, len(made))
    again = code_in(cache, firsts[1]["time"]) - made
    found["restart"] = times(firsts[1], kills[0]["time"], len(again))
    before = code_in(cache, time.time())
    began = launch(run, *arguments)
    first = told(run)[0][2]  # after it, the end of the run compiles the test
    found["warm"] = times(first, began, len(code_in(cache, first["time"]) - before))
    return found


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, reporting.spread(f["seconds"], digits=2), reporting.spread(f["warm-up"],
             digits=2), f"{f['new_files']['median']:.0f}"] for name, f in found.items()]
    return reporting.table(["", "first step after, s", "of it warm-up, s", "new files of code"],
                           rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--argument", action="append", default=[], metavar="WORD",
                        help="for the trainer, such as sample or --task.model=resnet18; repeatable")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    machine = reporting.machine()
    seen = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            seen.append(measure(Path(folder), options.argument or ["sample"]))
    found = {name: {key: reporting.summary([turn[name][key] for turn in seen])
                    for key in seen[0][name]} for name in NAMES}
    speedups = {
        f"cold/{name}": {key: reporting.summary(ratios([turn["cold"][key] for turn in seen],
                                                       [turn[name][key] for turn in seen]))
                         for key in ("seconds", "warm-up")} for name in ("warm", "restart")
    }  # fmt: skip
    if not options.json:
        print(reporting.describe(machine) + f"; n = {repeats}\n")
        print(show(found) + "\n")
        for name, ratio in speedups.items():
            print(f"{name}: {ratio['seconds']['median']:.1f} to the first step, "
                  f"{ratio['warm-up']['median']:.1f} of the warm-up (wanted: {WANTED:.0f} or more)")
        again = found["restart"]["new_files"]["max"]
        print(f"compiled again after the restart: {again:.0f} files (wanted: 0)")
    reporting.print_json("compile", machine=machine, starts=found, speedups=speedups)


if __name__ == "__main__":
    reporting.finish(main)
