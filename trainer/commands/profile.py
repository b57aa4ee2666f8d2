"""`python -m trainer profile`: time the phases and operations of a step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.config import command_line
from trainer.errors import ConfigError
from trainer.telemetry.status import Phase

WARM_UP = 3
"""Steps before the profiled steps."""
OPERATIONS = 10
"""Rows of the table of operations."""
PHASES = {
    Phase.READING: "data", Phase.DATA: "data", Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward and clip", Phase.OPTIMIZER: "update", Phase.STEP_END: "between steps",
}  # fmt: skip
"""Phase that begins at each progress mark."""


class PhaseClock:
    """Subscriber of progress marks that times each phase of a step and labels it in the profile.

    On a GPU it synchronizes at each mark, so that the time of a kernel counts in its own phase.
    """

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self.on = False
        self._phase, self._since_s, self._record = "", 0.0, None

    def __call__(self, point: Phase, step: int, epoch: int) -> None:
        if self.on and point in PHASES:
            self.switch(PHASES[point])

    def switch(self, phase: str) -> None:
        """End the current phase and begin another; "" begins none."""
        if phase == self._phase:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._phase:
            self.spent_s[self._phase] = (
                self.spent_s.get(self._phase, 0.0) + now - self._since_s)
        if self._record is not None:
            self._record.__exit__(None, None, None)
        self._phase, self._since_s, self._record = phase, now, None
        if phase:
            self._record = torch.profiler.record_function(f"phase: {phase}")  # type: ignore
            self._record.__enter__()  # type: ignore


def main(argv: Sequence[str]) -> int:
    """Profile a few steps, print the tables, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="trainer profile", allow_abbrev=False,
        description="Run a few training steps under torch's profiler and discard them. Writes a "
        "trace for TensorBoard (pip install torch-tb-profiler) or ui.perfetto.dev, and prints "
        "tables. The other arguments are those of a training run.")
    parser.add_argument("--active", type=int, default=10, help="number of profiled steps (10)")
    parser.add_argument("--to", type=Path, default=Path("profile"),
                        help="folder of the trace (profile)")
    options, rest = command_line.split(parser, argv)
    if options.active < 1:
        raise ConfigError(f"--active {options.active}: use 1 or more.")
    try:
        options.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {options.to}: {error}; choose a folder.") from error
    spent_s, averages, on_gpu = profile_steps(rest, options.active, options.to)
    print(_phases(spent_s, options.active))
    print(_operations(averages, on_gpu, options.active))
    print(f"trace: {options.to} (tensorboard --logdir {options.to}, with torch-tb-profiler; or "
          "ui.perfetto.dev)")
    return 0


def profile_steps(
    argv: Sequence[str], active: int, folder: Path
) -> tuple[dict[str, float], list[Any], bool]:
    """Return the seconds of each phase, the profiler's sums by operation, and whether on a GPU."""
    from trainer.commands.scratch_run import scratch_run

    clock = PhaseClock()
    steps = WARM_UP + active
    with scratch_run(argv, steps=2 * steps, command="profile", clock=clock) as run:
        on_gpu = run.context.world.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
        with torch.profiler.profile(
            activities=kinds, acc_events=True, schedule=torch.profiler.schedule(
                wait=0, warmup=WARM_UP, active=active, repeat=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)),
        ) as profiler:  # fmt: skip
            for number in range(steps):
                if number == WARM_UP:
                    clock.on = True
                    clock.switch("between steps")
                loader = run.loader
                result = run.step(loader.window())
                if result is None:  # the stream's epoch has ended
                    loader.next_epoch()
                else:
                    run.record.metrics.step(result, waited_s=loader.waited_s)
                if number == steps - 1:
                    clock.switch("")
                    clock.on = False
                profiler.step()
        return clock.spent_s, list(profiler.key_averages()), on_gpu


def _phases(spent_s: dict[str, float], steps: int) -> str:
    total = sum(spent_s.values())
    rows = [f"{name:<18} {1e3 * s / steps:>9.3f} {100 * s / total:>6.1f} %"
            for name, s in sorted(spent_s.items(), key=lambda item: -item[1])]
    return "\n".join([f"{'phase':<18} {'ms/step':>9} {'share':>8}", *rows, ""])


def _operations(averages: list[Any], on_gpu: bool, steps: int) -> str:
    own = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [a for a in averages if not a.key.startswith(("phase: ", "ProfilerStep"))]
    total = sum(getattr(a, own) for a in found) or 1
    found.sort(key=lambda a: -getattr(a, own))
    rows = [f"{a.key[:48]:<48} {getattr(a, own) / 1e3 / steps:>9.3f} "
            f"{100 * getattr(a, own) / total:>6.1f} % {a.count / steps:>7.1f}"
            for a in found[:OPERATIONS]]
    where = "on the GPU" if on_gpu else "on the CPU"
    return "\n".join([f"{f'operation ({where})':<48} {'ms/step':>9} {'share':>8} {'calls':>7}",
                      *rows, ""])
