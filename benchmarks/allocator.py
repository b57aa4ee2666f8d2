"""What is it worth that a step's memory is kept for the next one?

    python -m benchmarks.allocator [--models mlp,cnn,resnet18] [--rounds N] [--json]

The loop by hand of each model on all cores, in two processes that take turns, a block of steps
each: one as glibc leaves it, one with `trainer.distributed.allocator.keep_freed`, as each rank on a
CPU is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks import reporting
from benchmarks.peers import FOREVER, WORKS, batches, make
from benchmarks.turns import ratios

STEPS = {"mlp": 500, "cnn": 40, "resnet18": 12}
"""Of a block; the first block isn't counted."""
NAMES = ("kept", "given back")


class Process:
    """One of the two."""

    def __init__(self, model: str, way: str) -> None:
        self.seconds, self.faults = list[float](), list[float]()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.allocator", "--process", model, way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip

    def block(self, steps: int, *, counts: bool) -> None:
        """Make the steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        seconds, faults = json.loads(self._process.stdout.readline())
        if counts:
            self.seconds.append(seconds)
            self.faults.append(faults)

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def train(name: str, way: str) -> None:
    """In a process: as many steps as each line of stdin says; seconds and page faults of one."""
    from examples import bare_loop
    from trainer.distributed import allocator

    if way == "kept" and not allocator.keep_freed():
        raise SystemExit("this C library, or the environment, has settings of its own")
    work = WORKS[name]
    model, data = make(name)
    optimizer = bare_loop.make_optimizer(model)
    schedule = bare_loop.make_schedule(optimizer, FOREVER)
    source = batches(data, work, 0, 1)
    for line in sys.stdin:
        count, begun, faults = int(line), time.perf_counter(), _faults()
        for _ in range(count):
            window = itertools.islice(source, work.accumulation)
            bare_loop.train_step(model, optimizer, schedule, window, work.accumulation)
        figures = (time.perf_counter() - begun) / count, (_faults() - faults) / count
        print(json.dumps(figures), flush=True)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(name: str, rounds: int) -> dict[str, Process]:
    """Both, after `rounds` blocks in turn."""
    processes = {way: Process(name, way) for way in NAMES}
    for number in range(rounds + 1):
        for process in processes.values():
            process.block(STEPS[name], counts=number > 0)
    for process in processes.values():
        process.close()
    return processes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(STEPS), help="which of " + ", ".join(STEPS))
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the line for programs only")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        return train(*options.process)
    machine = reporting.machine()
    rows, results = [], dict[str, Any]()
    for name in options.models.split(","):
        kept, given_back = measure(name, options.rounds).values()
        ratio = reporting.interval(ratios(given_back.seconds, kept.seconds))
        both = [(reporting.summary(p.seconds), reporting.summary(p.faults)["median"])
                for p in (kept, given_back)]
        results[name] = {"seconds": [times for times, _ in both],
                         "faults": [faults for _, faults in both], "given_back_over_kept": ratio}
        rows.append([name, f"{options.rounds}", *(reporting.spread(t, 1e3, 3) for t, _ in both),
                     *(f"{faults:,.0f}" for _, faults in both),
                     "{:.3f} ({:.3f} – {:.3f})".format(*ratio)])
    if not options.json:
        print(reporting.describe(machine))
        print(reporting.table(["model", "blocks", *(f"{w}, ms a step" for w in NAMES),
                               *(f"{w}, faults a step" for w in NAMES), "given back / kept"], rows))
    reporting.print_json("allocator", machine=machine, models=results)


if __name__ == "__main__":
    reporting.finish(main)
