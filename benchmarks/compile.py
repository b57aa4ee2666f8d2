"""How long does a run with compiled code wait for its first step?

    python -m benchmarks.compile [--repeats N] [--quick]

off       a new run without compiling
cold      a new run; the cache of compiled code is empty
restart   the same run: its rank is killed at step 3, and the launcher starts it again
warm      the same command again after the run was stopped: new processes, the cache kept
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.reporting import ratios
from trainer.storage.layout import COMPILED, EVENTS
from trainer.telemetry.events import read_events

NAMES = ("off", "cold", "restart", "warm")
KILLED, STOPPED, STEPS = 3, 6, 8
WANTED = 5.0
LIMIT_S = 600.0
CODE = (".so", ".cpp", ".py", ".cubin")


def launch(run: Path, *arguments: str) -> float:
    """Give the command; the time of its start, in seconds since the epoch.

    Raises:
        SystemExit: it ended neither complete (0) nor stopped (75).
    """
    command = [sys.executable, "-m", "launch", "--nproc-per-node=1", "--max-restarts=2", "--",
               "sample", *arguments, "--run-dir", str(run), f"--steps={STEPS}", "--eval.every=off",
               "--log.level=error"]
    environment = reporting.environment()
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # it would replace the run's own cache
    began = time.time()
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S)
    if ended.returncode not in (0, 75):
        raise SystemExit(f"exit code {ended.returncode}\n"
                         + (ended.stdout + ended.stderr).decode(errors="replace")[-3000:])
    return began


def code_in(cache: Path, until: float) -> set[Path]:
    """The files of compiled code written before this time."""
    return {path for path in cache.rglob("*")
            if path.suffix in CODE and path.stat().st_mtime < until}


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """One repeat: for each start, seconds to the first step and of the warm-up, new files."""
    def events_of(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        events = read_events(run / EVENTS)
        return ([e for e in events if e["event"] == "first-step"],
                [e for e in events if e["event"] == "fault" and e["fault"].startswith("kill")])

    def times(first: dict[str, Any], began: float, new: int) -> dict[str, float]:
        entered = first["entered"]
        warm = entered.get("restore", entered["train"]) - entered["warm-up"]
        return {"seconds": first["time"] - began, "warm-up": warm, "new_files": new}

    plain, run = folder / "off", folder / "on"
    began = launch(plain, "--precision.compile=off", f"--inject=term:step={KILLED}")
    found = {"off": times(events_of(plain)[0][0], began, 0)}
    # The first launch: cold, killed, restarted, stopped.
    arguments = ["--precision.compile=on", f"--inject=kill:step={KILLED}",
                 f"--inject=term:step={STOPPED}"]
    cache = run / COMPILED
    began = launch(run, *arguments)
    firsts, kills = events_of(run)
    made = code_in(cache, kills[0]["time"])
    found["cold"] = times(firsts[0], began, len(made))
    again = code_in(cache, firsts[1]["time"]) - made
    found["restart"] = times(firsts[1], kills[0]["time"], len(again))
    before = code_in(cache, time.time())
    began = launch(run, *arguments)
    first = events_of(run)[0][2]  # the end of the run, after it, compiles the test
    found["warm"] = times(first, began, len(code_in(cache, first["time"]) - before))
    return found


def main() -> None:
    parser = reporting.parser("compile", __doc__)
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one repeat")
    options = parser.parse_args()
    machine = reporting.machine()
    repeats = []
    for _ in range(1 if options.quick else options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            repeats.append(measure(Path(folder)))
    times = {name: {key: [repeat[name][key] for repeat in repeats] for key in repeats[0][name]}
             for name in NAMES}
    found = {name: {key: reporting.summary(values) for key, values in own.items()}
             for name, own in times.items()}
    rows = [[name, reporting.spread(f["seconds"]), reporting.spread(f["warm-up"]),
             f"{f['new_files']['max']:.0f}"] for name, f in found.items()]
    print(reporting.table([f"n = {len(repeats)}", "first step after, s", "warm-up in this time, s",
                           "new files of code"], rows))
    for name in ("restart", "warm"):
        seconds, warm_up = (statistics.median(ratios(times["cold"][key], times[name][key]))
                            for key in ("seconds", "warm-up"))
        print(f"{name}: 1/{seconds:.1f} of the cold time to the first step, 1/{warm_up:.1f} of its "
              f"warm-up (wanted: 1/{WANTED:.0f} or less, and no new files)")
    reporting.print_json("compile", machine=machine, starts=found)


if __name__ == "__main__":
    reporting.finish(main)
