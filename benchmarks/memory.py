"""Whether a long run grows: the resident memory of each rank over thousands of steps.

    python -m benchmarks.memory [--steps 2500] [--ranks 1] [--task chaos] [--quick] [--json]

A whole run of this trainer with a save every 50 steps and a validation every 100, in this process
(or in `--ranks` new ones), on a tiny conv net (`chaos`: 150 images of 8x8) or the small CNN on the
bundled sample (`sample`). The resident memory is read every 10 steps; the slope is that of the
straight line of least squares through the last half, when buffers, caches and arenas have their
size.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from benchmarks import reporting
from benchmarks.ranks import in_ranks
from benchmarks.turns import slope

EVERY = 10
"""Steps from reading to reading."""
WANTED_MB = 1.0
"""A thousand steps."""
TASKS = {
    "chaos": ["--task=benchmarks.chaos_task:Chaos", "--batch.global-size=8",
              "--batch.micro-size=4"],
    "sample": ["sample"],
}  # fmt: skip


def resident_bytes() -> int:
    """Of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(launch: Any, steps: int, task: str, folder: str) -> list[tuple[int, float]]:
    """In a rank: (step, MB) over the run."""
    from trainer.config import command_line
    from trainer.distributed.world import World
    from trainer.loop import train
    from trainer.resilience.stop_signals import StopSignals
    from trainer.resilience.watchdog import Watchdog
    from trainer.run.build import build
    from trainer.run.warmup import start
    from trainer.telemetry.events import Log

    config = command_line.parse_config([*TASKS[task], f"--steps={steps}", "--eval.every=100",
                                        "--device=cpu",
                                        "--checkpoint.every=50", f"--run-dir={folder}/run",
                                        "--log.level=error"])
    log = Log(launch.rank, level="error")
    found: list[tuple[int, float]] = []
    with (World.form(device="cpu", threads=1, launch=launch) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        built = build(config, world, log, StopSignals(), watchdog.marks)

        def look(step: int) -> None:
            if step % EVERY == 0:
                found.append((step, resident_bytes() / 1e6))

        log.status.on_step(look)
        train(start(built))
        built.guard.close()
    return found


def growth(readings: list[tuple[int, float]]) -> dict[str, float]:
    """MB at the beginning, half-way and at the end; MB per 1,000 steps of the last half."""
    half = readings[len(readings) // 2:]
    steps, sizes = zip(*half, strict=True)
    return {"first_mb": readings[0][1], "middle_mb": half[0][1], "last_mb": half[-1][1],
            "mb_per_1000_steps": 1000 * slope(steps, sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500, help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--task", choices=tuple(TASKS), default="chaos", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="600 steps: too few for the figure")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    steps = 600 if options.quick else options.steps
    if steps < 8 * EVERY:
        parser.error(f"--steps {steps}: use {8 * EVERY} or more.")
    machine = reporting.machine()
    with tempfile.TemporaryDirectory() as folder:
        ranks = in_ranks(measure, options.ranks, steps, options.task, folder)
    found = [growth(readings) for readings in ranks]
    if not options.json:
        print(reporting.describe(machine) + f"; {steps} steps of {options.task}\n")
        print(reporting.table(
            ["rank", "first, MB", "half-way, MB", "last, MB", "last half, MB per 1,000 steps"],
            [[f"{rank}", *(f"{f[key]:.1f}" for key in ("first_mb", "middle_mb", "last_mb")),
              f"{f['mb_per_1000_steps']:.2f}"] for rank, f in enumerate(found)]))
        print(f"\nwanted: at most {WANTED_MB:g}")
    reporting.print_json("memory", machine=machine, steps=steps, task=options.task, ranks=found)


if __name__ == "__main__":
    reporting.finish(main)
