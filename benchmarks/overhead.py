"""The trainer's own time in the main thread of a step: what isn't data, forward, backward, clip,
update (zero_grad and step) or schedule.

    python -m benchmarks.overhead [--steps N] [--models mlp,cnn,cnn-64,cnn-128] [--json]

Everything is on: metrics.jsonl each step, TensorBoard every 50, the watchdog, checksums of all
ranks every 100, a durable checkpoint every 50 steps (500 on the MLP), one rank, one thread. The six
parts are timed by perf_counter around the calls that a loop by hand makes too. What is left from
step to step holds the time in which torch frees the graph and the batch as well; so the same loop
by hand, with the same model, data and stopwatch, runs in turn with the trainer (blocks of `BLOCK`
steps in one process), and what is left of its steps is shown, and taken off: own = ours - by hand.

Where a forward leaves nothing in the processor's caches, whoever comes first after it waits for
memory: the trainer's code, or by hand the next forward. So the whole steps are compared as well,
block by block: the median of (ours - by hand) / by hand, with its 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import reporting

MODELS = {
    "mlp": ["--task=benchmarks.small_tasks:TinyMlp", "--checkpoint.every=500",
            "--batch.global-size=32", "--batch.micro-size=32"],
    "cnn": ["--checkpoint.every=50"],
    "cnn-64": ["--checkpoint.every=50", "--batch.micro-size=64"],
    "cnn-128": ["--checkpoint.every=50", "--batch.micro-size=128"],
}  # fmt: skip
"""The tiny MLP (2-128-128-3), and the small CNN of the default recipe with its validations off: 128
samples a step, in micro-batches of 32, of 64, or in one."""

WARM_UP = 60
BLOCK = 25
"""Steps of the trainer, then as many by hand, in turn."""

NAMES = ("step", "step by hand", "rest", "rest by hand")
MORE = "more"
"""Of each block, the share by which the trainer's median step is longer than that by hand."""


class Stopwatch:
    """Time inside the calls that it wraps, nested ones counted once."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added."""

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
    """Seconds of each step: whole, and what is left beside the six parts (`rest`), of the trainer
    and of the loop `by hand`; and `MORE`."""
    import torch

    import trainer.step
    from trainer.config import command_line
    from trainer.distributed.world import LaunchInfo, World
    from trainer.loop import train
    from trainer.resilience.stop_signals import StopSignals
    from trainer.resilience.watchdog import Watchdog
    from trainer.run.build import build
    from trainer.run.warmup import start
    from trainer.telemetry.events import Log

    config = command_line.parse_config([*MODELS[model], f"--steps={steps}", "--eval.every=off",
                                        "--device=cpu",
                                        "--data.workers=0", f"--run-dir={folder / model}",
                                        "--log.level=warning"])
    watch, log = Stopwatch(), Log(level="warning")
    found: dict[str, list[float]] = {name: [] for name in (*NAMES, MORE)}
    with (World.form(device="cpu", threads=1, launch=LaunchInfo()) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        built = build(config, world, log, StopSignals(), watchdog.marks)
        by_hand = Hand(build(dataclasses.replace(config, run=folder / "by-hand"), world, log,
                             StopSignals(), watchdog.marks), watch)
        loader, objective = built.data.loader, built.trainable.compute.objective
        loader._source = Timed(loader._source, watch)
        objective.loss = watch.around(objective.loss)
        time_updates(built.setup.optimizer, built.setup.schedule, watch)
        before = torch.Tensor.backward, trainer.step.clip, trainer.step.zero_grad
        torch.Tensor.backward = watch.around(before[0])  # type: ignore[method-assign]
        trainer.step.clip = watch.around(before[1])
        trainer.step.zero_grad = watch.around(before[2])
        last = [(0.0, 0.0)]

        def mark(step: int) -> None:
            now = time.perf_counter(), watch.spent_s
            whole, timed = now[0] - last[0][0], now[1] - last[0][1]
            if step % BLOCK and step > WARM_UP:  # the first of a block has cold caches
                found["step"].append(whole)
                found["rest"].append(whole - timed)
            if step % BLOCK == BLOCK - 1:
                for number in range(BLOCK):
                    whole, timed = by_hand.step()
                    if number and step > WARM_UP:
                        found["step by hand"].append(whole)
                        found["rest by hand"].append(whole - timed)
                if step > WARM_UP + BLOCK:
                    ours, hand = (statistics.median(found[name][1 - BLOCK:]) for name in NAMES[:2])
                    found[MORE].append(ours / hand - 1)
            last[0] = time.perf_counter(), watch.spent_s

        log.status.on_step(mark)
        try:
            train(start(built))
        finally:
            (torch.Tensor.backward, trainer.step.clip,  # type: ignore[method-assign]
             trainer.step.zero_grad) = before
        built.guard.close()
        by_hand.close()
    return found


class Hand:
    """The loop as one writes it by hand, with model, data and loss of a run that has been built,
    and torch's own optimizer, schedule and clipping."""

    def __init__(self, built: Any, watch: Stopwatch) -> None:
        import torch
        from torch.nn.utils import clip_grad_norm_

        from examples import bare_loop

        self._built, self._watch, self._clip = built, watch, watch.around(clip_grad_norm_)
        self._compute, self._config = built.trainable.compute, built.context.config
        self._source = Timed(built.data.loader._source, watch)
        self._loss = watch.around(self._compute.objective.loss)
        self._micro_batches = self._config.batch.micro_batches
        groups = [{name: group[name] for name in ("params", "lr", "weight_decay")}
                  for group in built.setup.optimizer.param_groups]
        self._optimizer = torch.optim.AdamW(groups, fused=True)
        self._schedule = bare_loop.make_schedule(self._optimizer, self._config.steps)
        time_updates(self._optimizer, self._schedule, watch)
        self._optimizer.zero_grad = watch.around(  # type: ignore[method-assign]
            self._optimizer.zero_grad)

    def step(self) -> tuple[float, float]:
        """One step: seconds, and those of them in the six parts."""
        compute, config = self._compute, self._config
        begun = time.perf_counter(), self._watch.spent_s
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(self._micro_batches):
            batch = next(self._source).batch
            with compute.autocast():
                loss = self._loss(compute.model, batch).total / config.batch.global_size
            loss.backward()
        self._clip(compute.parameters, config.clip.norm)
        self._optimizer.step()
        self._schedule.step()
        return time.perf_counter() - begun[0], self._watch.spent_s - begun[1]

    def close(self) -> None:
        """Close what was built for it."""
        self._built.guard.close()


def time_updates(optimizer: Any, schedule: Any, watch: Stopwatch) -> None:
    """Time update and schedule of a step."""
    optimizer.step = watch.around(optimizer.step)
    schedule.step = watch.around(schedule.step)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run (1500)")
    parser.add_argument("--models", default=",".join(MODELS), help="which of " + ", ".join(MODELS))
    parser.add_argument("--json", action="store_true", help="print the line for programs only")
    options = parser.parse_args()
    machine = reporting.machine()
    rows, found = [], {}
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            times = measure(model, options.steps + WARM_UP + 1, Path(folder))
        figures = {name: reporting.summary(values) for name, values in times.items()}
        medians = {name: figure["median"] for name, figure in figures.items()}
        means = {name: sum(values) / len(values) for name, values in times.items()}
        own = medians["rest"] - medians["rest by hand"]
        own_mean = means["rest"] - means["rest by hand"]
        share = own / medians["step"]
        more = reporting.interval(times[MORE])
        found[model] = {**{name: figures[name] for name in NAMES}, "own": own,
                        "own_mean": own_mean, "share": share, "more": more}
        rows.append([model, f"{figures['step']['n']:.0f}",
                     *(reporting.spread(figures[name], 1e3, 3) for name in NAMES),
                     f"{1e3 * own:.3f}", f"{1e3 * own_mean:.3f}", f"{100 * share:.2f} %",
                     "{:+.1f} ({:+.1f} – {:+.1f}) %".format(*(100 * x for x in more))])
    if not options.json:
        print(reporting.describe(machine))
        print(reporting.table(["model", "n", *(f"{name}, ms" for name in NAMES), "own, ms",
                               "own, mean ms", "of the step", "whole step, pairs"], rows))
    reporting.print_json("overhead", machine=machine, models=found)


if __name__ == "__main__":
    reporting.finish(main)
