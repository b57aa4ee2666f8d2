"""What does the trainer's own code cost in each step?

    python -m benchmarks.overhead [--steps N] [--models mlp,cnn,cnn-64,cnn-128]

The rest of a step is its time outside of data, forward, backward, clip, update and schedule, each
timed around its call. The rest of the same loop by hand is subtracted: torch frees the graph and
the batch in it. Whole steps are compared as well, block by block. The watching is what a step does
to find buffers and parameters that the forward begins to change, or makes non-finite: of three
blocks, the second is without it, and the control compares the third with the first. The start
checks are the median difference between a start and three steps with and without them, in turn.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import trainer.step
from benchmarks import reporting
from benchmarks.building import builder
from examples import bare_loop
from trainer.loop import train
from trainer.run.warmup import start

MODELS = {
    "mlp": ["--task=benchmarks.small_tasks:TinyMlp", "--checkpoint.every=500",
            "--batch.global-size=32", "--batch.micro-size=32"],
    "cnn": ["--checkpoint.every=50"],
    "cnn-64": ["--checkpoint.every=50", "--batch.micro-size=64"],
    "cnn-128": ["--checkpoint.every=50", "--batch.micro-size=128"],
}  # fmt: skip
"""The tiny MLP (2-128-128-3), and the small CNN of the default recipe without validations: 128
samples per step, in micro-batches of 32, of 64, or in one."""
WARM_UP, BLOCK = 60, 25
"""Steps that do not count; steps of the trainer, then as many by hand, in turn."""
NAMES = ("step", "step by hand", "rest", "rest by hand")
MORE, WATCHING, CONTROL = "more", "watching", "control"
"""By what share the trainer's median step is longer than that by hand, block by block; seconds that
the watching adds to a rest, and that the same step takes longer two blocks later."""


class Stopwatch:
    """Time inside the calls that it wraps; nested calls count once."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent_s += time.perf_counter() - start

        return timed


class Timed:
    """An iterator whose `next` is timed."""

    def __init__(self, inner: Any, watch: Stopwatch) -> None:
        self._inner = inner
        self._next = watch.around(inner.__next__)

    def __next__(self) -> Any:
        return self._next()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measure(model: str, steps: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each step and of its rest, by the trainer and by hand."""
    watch = Stopwatch()
    flags = [*MODELS[model], f"--steps={steps}", "--eval.every=off", "--data.workers=0"]
    with builder() as build:
        run = build(*flags, f"--run-dir={folder / model}")
        by_hand = Hand(build(*flags, f"--run-dir={folder / 'by-hand'}"), watch)
        recorder = Recorder(by_hand, watch, Watching(run))
        loader, objective = run.loader, run.trainable.compute.objective
        loader._source = Timed(loader._source, watch)
        objective.loss = watch.around(objective.loss)  # type: ignore[method-assign]
        time_updates(run.setup.optimizer, run.setup.schedule, watch)
        before = torch.Tensor.backward, trainer.step.clip
        torch.Tensor.backward = watch.around(before[0])  # type: ignore[method-assign]
        trainer.step.clip = watch.around(before[1])
        run.setup.optimizer.zero_grad = watch.around(  # type: ignore[method-assign]
            run.setup.optimizer.zero_grad)
        run.context.status.on_step(recorder.mark)
        try:
            train(start(run))
        finally:
            torch.Tensor.backward, trainer.step.clip = before  # type: ignore[method-assign]
        run.guard.close()
        by_hand.close()
    return recorder.found


def start_checks_s(model: str, folder: Path) -> float:
    """Seconds that the checks of a task add to a start and the first three steps."""
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(9):
        for checks, found in seconds.items():
            flags = [*MODELS[model], "--steps=4", f"--start-checks={checks}", "--eval.every=off"]
            with builder() as build:
                built = build(*flags, f"--run-dir={folder / checks}-{turn}")
                began = time.perf_counter()
                run = start(built)
                for _ in range(3):
                    run.step(run.loader.window())
                found.append(time.perf_counter() - began)
                run.guard.close()
    return statistics.median(
        on - off for on, off in zip(seconds["on"], seconds["off"], strict=True))


class Watching:
    """What a step of a run does to watch buffers and parameters, which can be left out."""

    def __init__(self, run: Any) -> None:
        objective, boundary = run.trainable.compute.objective, run.trainable.boundary
        self._parts = [(owner, name, getattr(owner, name), nothing) for owner, name, nothing in (
            (objective, "_changed", lambda: False), (objective, "_nonfinite", lambda: None),
            (boundary.buffers, "restore_storage", lambda: None),
            (boundary, "note_versions", lambda: None))]

    def switch(self, on: bool) -> None:
        for owner, name, original, nothing in self._parts:
            setattr(owner, name, original if on else nothing)


class Recorder:
    """Notes the trainer's steps, and after each block makes as many by hand. Of three blocks, the
    second is without the watching."""

    def __init__(self, by_hand: Hand, watch: Stopwatch, watching: Watching) -> None:
        self.found: dict[str, list[float]] = {
            name: [] for name in (*NAMES, MORE, WATCHING, CONTROL)}
        self._by_hand, self._watch, self._last = by_hand, watch, (0.0, 0.0)
        self._watching, self._blocks, self._rests = watching, list[float](), list[float]()

    def mark(self, step: int) -> None:
        whole = time.perf_counter() - self._last[0]
        timed = self._watch.spent_s - self._last[1]
        watched = len(self._blocks) != 1
        if step % BLOCK and step > WARM_UP:  # the first of a block has cold caches
            self._rests.append(whole - timed)
            if watched:
                self.found["step"].append(whole)
                self.found["rest"].append(whole - timed)
        if step % BLOCK == BLOCK - 1:
            for number in range(BLOCK):
                whole, timed = self._by_hand.step()
                if number and step > WARM_UP:
                    self.found["step by hand"].append(whole)
                    self.found["rest by hand"].append(whole - timed)
            if step > WARM_UP + BLOCK:
                self._end_block(watched)
            self._rests.clear()
        self._last = time.perf_counter(), self._watch.spent_s

    def _end_block(self, watched: bool) -> None:
        if watched:
            ours, hand = (statistics.median(self.found[name][1 - BLOCK:]) for name in NAMES[:2])
            self.found[MORE].append(ours / hand - 1)
        self._blocks.append(statistics.median(self._rests))
        if len(self._blocks) == 3:
            first, without, last = self._blocks
            self.found[WATCHING].append((first + last) / 2 - without)
            self.found[CONTROL].append(last - first)
            self._blocks.clear()
        self._watching.switch(len(self._blocks) != 1)


class Hand:
    """The loop by hand with model, data and loss of a run that has been built, and torch's own
    optimizer, schedule and clipping."""

    def __init__(self, run: Any, watch: Stopwatch) -> None:
        self._run, self._watch, self._clip = run, watch, watch.around(clip_grad_norm_)
        self._source = Timed(run.loader._source, watch)
        self._loss = watch.around(run.trainable.compute.objective.loss)
        groups = [{name: group[name] for name in ("params", "lr", "weight_decay")}
                  for group in run.setup.optimizer.param_groups]
        self._optimizer = torch.optim.AdamW(groups, fused=True)
        self._schedule = bare_loop.make_schedule(self._optimizer, run.context.config.steps)
        time_updates(self._optimizer, self._schedule, watch)
        self._optimizer.zero_grad = watch.around(  # type: ignore[method-assign]
            self._optimizer.zero_grad)
        self.close = run.guard.close

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and those in the six parts."""
        compute, config = self._run.trainable.compute, self._run.context.config
        began = time.perf_counter(), self._watch.spent_s
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(config.batch.global_size // config.batch.micro_size):
            batch = next(self._source).batch
            with compute.autocast():
                loss = self._loss(compute.model, batch).total / config.batch.global_size
            loss.backward()
        self._clip(compute.parameters, config.clip.norm)
        self._optimizer.step()
        self._schedule.step()
        return time.perf_counter() - began[0], self._watch.spent_s - began[1]


def time_updates(optimizer: Any, schedule: Any, watch: Stopwatch) -> None:
    """Time update and schedule of a step."""
    optimizer.step = watch.around(optimizer.step)
    schedule.step = watch.around(schedule.step)


def main() -> None:
    parser = reporting.parser("overhead", __doc__)
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run (1500)")
    parser.add_argument("--models", type=reporting.some_of(MODELS), default=",".join(MODELS),
                        help="(%(default)s)")
    options = parser.parse_args()
    machine = reporting.machine()
    rows, found = [], {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            times = measure(model, options.steps + WARM_UP + 1, Path(folder))
            checks_s = start_checks_s(model, Path(folder))
        figures: dict[str, Any] = {name: reporting.summary(times[name]) for name in NAMES}
        own, own_mean = (average(times["rest"]) - average(times["rest by hand"])
                         for average in (statistics.median, statistics.fmean))
        share, more = own / figures["step"]["median"], reporting.interval(times[MORE])
        watching, control = (reporting.interval(times[name]) for name in (WATCHING, CONTROL))
        found[model] = figures | {"own": own, "own_mean": own_mean, "share": share, "more": more,
                                  "watching": watching, "control": control,
                                  "start_checks": checks_s}
        rows.append([model, f"{figures['step']['n']}",
                     *(reporting.spread(figures[name], 1e3, 3) for name in NAMES),
                     f"{1e3 * own:.3f}", f"{1e3 * own_mean:.3f}", f"{100 * share:.2f} %",
                     reporting.within([100 * value for value in more], "+.1f") + " %",
                     *(reporting.within([1e3 * value for value in values], "+.3f")
                       for values in (watching, control)),
                     f"{100 * watching[0] / figures['step']['median']:.2f} %",
                     f"{1e3 * checks_s:.1f} ({checks_s / figures['step']['median']:.1f} steps)"])
    print(reporting.table(["model", "n", *(f"{name}, ms" for name in NAMES), "own, ms",
                           "own, mean ms", "of the step", "whole step", "watching, ms",
                           "control, ms", "watching of the step", "start checks, ms"], rows))
    reporting.print_json("overhead", machine=machine, models=found)


if __name__ == "__main__":
    reporting.finish(main)
