"""The trainer's own time in the main thread of a step: what isn't data, forward, backward, clip,
update (zero_grad and step) or schedule.

    python -m benchmarks.overhead [--steps N] [--models mlp,cnn] [--json]

Everything is on: metrics.jsonl each step, TensorBoard every 50, the watchdog, checksums of all
ranks every 100, a durable checkpoint every 50 steps (500 on the MLP), one rank, one thread. The six
parts are timed by perf_counter around the calls that a loop by hand makes too; the rest of the time
from step to step is the trainer's own.
"""

from __future__ import annotations

import argparse
import functools
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
}  # fmt: skip
"""The tiny MLP (2-128-128-3), and the small CNN of the default recipe with its validations off."""

WARM_UP = 60


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
    """Seconds of each step, whole and the trainer's own, of a run in this process."""
    import torch

    import trainer.step
    from trainer import cli
    from trainer.build import build
    from trainer.log import Log
    from trainer.loop import train
    from trainer.stop import StopRequest
    from trainer.watchdog import Watchdog
    from trainer.world import Launch, World

    config = cli.parse([*MODELS[model], f"--steps={steps}", "--eval.every=off", "--device=cpu",
                        "--data.workers=0", f"--run={folder / model}", "--log.level=warning"])
    watch = Stopwatch()
    log = Log(level="warning")
    with (World.form(device="cpu", threads=1, launch=Launch()) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        parts = build(config, world, log, StopRequest(), watchdog.pulse)
        parts.loader._source = Timed(parts.loader._source, watch)
        objective, optimizer = parts.step.objective, parts.step.optimizer
        objective._loss = watch.around(objective._loss)
        optimizer.step = watch.around(optimizer.step)
        optimizer.zero_grad = watch.around(optimizer.zero_grad)
        parts.step.schedule.step = watch.around(parts.step.schedule.step)
        before = torch.Tensor.backward, trainer.step.clip
        torch.Tensor.backward = watch.around(before[0])  # type: ignore[method-assign]
        trainer.step.clip = watch.around(before[1])
        ends: list[tuple[float, float]] = []
        stepped = parts.log.stepped

        def mark(step: int) -> None:
            ends.append((time.perf_counter(), watch.spent_s))
            stepped(step)

        parts.log.stepped = mark  # type: ignore[method-assign]
        try:
            train(parts)
        finally:
            torch.Tensor.backward, trainer.step.clip = before  # type: ignore[method-assign]
        parts.close()
    pairs = list(zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False))
    whole = [b[0] - a[0] for a, b in pairs]
    own = [b[0] - a[0] - (b[1] - a[1]) for a, b in pairs]
    return {"step": whole, "own": own}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run (1500)")
    parser.add_argument("--models", default=",".join(MODELS), help="which of mlp, cnn")
    parser.add_argument("--json", action="store_true", help="print the line for programs only")
    options = parser.parse_args()
    machine = reporting.machine()
    rows, found = [], {}
    for model in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            times = measure(model, options.steps + WARM_UP + 1, Path(folder))
        step, own = (reporting.summary(times[name]) for name in ("step", "own"))
        mean = {name: sum(values) / len(values) for name, values in times.items()}
        share = mean["own"] / mean["step"]
        found[model] = {"step": step, "own": own, "mean": mean, "share": share}
        rows.append([model, f"{step['n']:.0f}", reporting.spread(step, 1e3, 3),
                     reporting.spread(own, 1e3, 3), f"{1e3 * mean['own']:.3f}",
                     f"{100 * share:.2f} %"])
    if not options.json:
        print(reporting.describe(machine))
        print(reporting.table(["model", "n", "step, ms", "own, ms", "own, mean ms", "of the step"],
                              rows))
    reporting.print_json("overhead", machine=machine, models=found)


if __name__ == "__main__":
    main()
