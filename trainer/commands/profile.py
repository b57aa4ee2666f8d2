"""`python -m trainer profile`: time the phases and operations of a step."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.commands.scratch_run import next_step, scratch_run
from trainer.config import command_line
from trainer.errors import ConfigError
from trainer.run.saved_run import config_error_on_write
from trainer.telemetry.status import Phase

WARM_UP = 3
"""Steps before the profiled steps."""
OPERATIONS = 10
"""Rows of the table of operations."""
PHASES = {
    Phase.READING: "data", Phase.DATA: "data", Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward and clip", Phase.OPTIMIZER: "update", Phase.STEP_END: "between steps"}
"""Phase that begins at each progress mark."""


class PhaseClock:
    """Subscriber of progress marks that times each phase of a step and labels it in the profile.

    On a GPU it synchronizes at each mark, so that the time of a kernel counts in its own phase.
    """

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._phase, self._since_s = "", 0.0
        self._label = contextlib.ExitStack()

    def __call__(self, point: Phase, step: int, epoch: int) -> None:
        if self._phase and point in PHASES:
            self.switch(PHASES[point])

    def switch(self, phase: str) -> None:
        """End the current phase and begin another; "" begins none, and stops the clock."""
        if phase == self._phase:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._label.close()
        if self._phase:
            self.spent_s[self._phase] += now - self._since_s
        self._phase, self._since_s = phase, now
        if phase:
            self._label.enter_context(torch.profiler.record_function(f"phase: {phase}"))


def main(argv: Sequence[str]) -> int:
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
    with config_error_on_write(f"--to {options.to}", "choose a folder that can be written"):
        options.to.mkdir(parents=True, exist_ok=True)
    clock = PhaseClock()
    with scratch_run(rest, steps=2 * (WARM_UP + options.active), command="profile",
                     clock=clock) as run:
        on_gpu = run.context.world.device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
        with torch.profiler.profile(
            activities=activities, acc_events=True, schedule=torch.profiler.schedule(
                wait=0, warmup=WARM_UP, active=options.active, repeat=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(options.to)),
        ) as profiler:
            for number in range(WARM_UP + options.active):
                if number == WARM_UP:
                    clock.switch("between steps")
                run.folder.metrics.step(next_step(run), waited_s=run.loader.waited_s)
                if number == WARM_UP + options.active - 1:
                    clock.switch("")
                profiler.step()
    print(_phases(clock.spent_s, options.active))
    print(profiler.key_averages().table(
        f"self_{'device' if on_gpu else 'cpu'}_time_total", row_limit=OPERATIONS,
        max_name_column_width=48))
    print(f"trace: {options.to} (tensorboard --logdir {options.to}, with torch-tb-profiler; or "
          "ui.perfetto.dev)")
    return 0


def _phases(spent_s: dict[str, float], steps: int) -> str:
    total = sum(spent_s.values())
    rows = [f"{name:<18} {1e3 * s / steps:>9.3f} {100 * s / total:>6.1f} %"
            for name, s in sorted(spent_s.items(), key=lambda item: -item[1])]
    return "\n".join([f"{'phase':<18} {'ms/step':>9} {'share':>8}", *rows, ""])
