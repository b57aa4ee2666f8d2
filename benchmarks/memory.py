"""Does the memory of a long run grow? The resident memory over thousands of steps.

    python -m benchmarks.memory [--steps 2500] [--task chaos] [--quick]

A run with a save every 50 steps and a validation every 100. The growth is the slope of the
least-squares line through the last half, when buffers, caches and arenas have reached their size.
"""

from __future__ import annotations

import os
import statistics
import tempfile

from benchmarks import reporting
from benchmarks.building import builder
from trainer.loop import train
from trainer.run.warmup import start

EVERY = 10
"""Steps from reading to reading."""
GROWTH, WANTED_MB = "last half, MB per 1,000 steps", 1.0
TASKS = {
    "chaos": ["--task=benchmarks.chaos_task:Chaos", "--batch.global-size=8",
              "--batch.micro-size=4"],
    "sample": ["sample"],
}  # fmt: skip


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(steps: int, task: str, folder: str) -> list[tuple[int, float]]:
    """(step, MB) over a run."""
    found: list[tuple[int, float]] = []
    with builder() as build:
        run = build(*TASKS[task], f"--steps={steps}", "--eval.every=100", "--checkpoint.every=50",
                    f"--run-dir={folder}/run")

        def look(step: int) -> None:
            if step % EVERY == 0:
                found.append((step, resident_bytes() / 1e6))

        run.context.status.on_step(look)
        train(start(run))
        run.guard.close()
    return found


def growth(readings: list[tuple[int, float]]) -> dict[str, float]:
    """MB at the beginning, half-way and at the end; MB per 1,000 steps of the last half."""
    half = readings[len(readings) // 2:]
    steps, sizes = zip(*half, strict=True)
    return {"first, MB": readings[0][1], "half-way, MB": half[0][1], "last, MB": half[-1][1],
            GROWTH: 1000 * statistics.linear_regression(steps, sizes).slope}


def main() -> None:
    parser = reporting.parser("memory", __doc__)
    parser.add_argument("--steps", type=int, default=2500, help="(%(default)s)")
    parser.add_argument("--task", choices=tuple(TASKS), default="chaos", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="600 steps: too few for the figure")
    options = parser.parse_args()
    steps = 600 if options.quick else options.steps
    machine = reporting.machine()
    with tempfile.TemporaryDirectory() as folder:
        found = growth(measure(steps, options.task, folder))
    print(reporting.table(list(found), [[f"{mb:.2f}" for mb in found.values()]]))
    print(f"wanted: growth of at most {WANTED_MB:g} MB per 1,000 steps")
    reporting.print_json("memory", machine=machine, steps=steps, task=options.task, found=found)


if __name__ == "__main__":
    reporting.finish(main)
