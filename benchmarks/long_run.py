"""Whether a start and the memory grow with the length of a run.

    python -m benchmarks.long_run [--lengths 1000 …] [--rounds 5] [--steps 200000]

Start: seconds from the construction of a run to the end of its first new step. The run folder is
that of a real run, lengthened: metrics.jsonl has N steps, events.jsonl a save in each 100, and the
checkpoint is of step N. The lengths take turns, and each start gets a fresh copy of its folder.

Memory: resident memory of one rank over a run of a tiny network without validation, with saves
switched off, and with a save every 100 steps that fails; and over an 80th as many steps of the task
of `benchmarks.chaos` with saves and validations. The slope is that of the straight line of least
squares through the last half.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.building import builder
from trainer.checkpoint.store import Store
from trainer.loop import train
from trainer.run.warmup import start
from trainer.storage.jsonl import FileMark
from trainer.storage.layout import STATE
from trainer.telemetry.step_timing import resident_mb

TASK = ["--task=benchmarks.small_tasks:TinyMlp", "--batch.global-size=8", "--batch.micro-size=8",
        "--data.workers=0"]
BEGUN = 20
"""Steps of the real run that is lengthened."""
SAVES = {"off": (1, ["--checkpoint.every=off"]),
         "failing": (1, ["--checkpoint.every=100", "--inject=enospc:phase=save-begin:always"]),
         "chaos": (80, ["--task=benchmarks.chaos_task:Chaos", "--batch.micro-size=4",
                        "--checkpoint.every=50", "--eval.every=100"])}
"""Run → the share of --steps that it makes, and its flags."""
READINGS = 200


class Stop(Exception):
    """The measurement is complete."""


def run(arguments: list[str], look: Any) -> None:
    """Train in this process; `look` is called with each completed step."""
    with builder() as build:
        built = build(*TASK, *arguments)
        built.context.status.on_step(look)
        try:
            train(start(built))
        except Stop:
            built.guard.abandon()
        else:
            built.guard.close()


def lengthen(begun: Path, folder: Path, length: int) -> None:
    """Copy a run folder, and make it that of a run of `length` steps."""
    shutil.copytree(begun, folder, ignore=shutil.ignore_patterns("checkpoints"))
    old = Store(begun / "checkpoints").verify(BEGUN)
    line = json.loads((begun / "metrics.jsonl").read_text().splitlines()[-1])
    text = "".join(json.dumps({**line, "step": step}) + "\n" for step in range(1, length + 1))
    (folder / "metrics.jsonl").write_text(text)
    events = (begun / "events.jsonl").read_text()
    save = next(event for event in events.splitlines() if '"event": "save"' in event)
    (folder / "events.jsonl").write_text(events + (save + "\n") * (length // 100))
    state = json.loads((old.path / STATE).read_text())
    state["progress"] |= {"step": length, "validated": length}
    state |= {"lines": [], "record": vars(FileMark().after(text.encode()))}
    assert old.run is not None
    with Store(folder / "checkpoints", run=old.run).stage(length, generation=0) as stage:
        for name in old.manifest["files"]:
            data = (old.path / name).read_bytes()
            stage.write(name, json.dumps(state).encode() if name == STATE else data)
        stage.commit(kind="periodic", run=old.run)


def start_seconds(folder: Path, length: int) -> float:
    """Seconds to the first new step of a run that continues in a copy of a folder."""
    found: list[float] = []

    def look(step: int) -> None:
        assert step == length + 1, step
        found.append(time.perf_counter() - began)
        raise Stop

    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        began = time.perf_counter()
        run([f"--steps={length + 10}", f"--run-dir={copy}"], look)
    return found[0]


def memory(saves: str, steps: int, folder: str) -> list[tuple[int, float]]:
    """(step, MB) over a run."""
    found: list[tuple[int, float]] = []
    share, flags = SAVES[saves]
    steps //= share

    def look(step: int) -> None:
        if step % max(1, steps // READINGS) == 0:
            found.append((step, resident_mb()))
        if step == steps:
            raise Stop  # the last save would fail

    run([f"--steps={steps}", f"--run-dir={folder}/{saves}", *flags], look)
    return found


def main() -> None:
    parser = reporting.parser("long_run", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5, help="starts per length (%(default)s)")
    parser.add_argument("--steps", type=int, default=200_000, help="for memory (%(default)s)")
    options = parser.parse_args()
    machine = reporting.machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([f"--steps={BEGUN}", f"--run-dir={folder}/begun"], lambda step: None)
        for length in options.lengths:
            lengthen(folder / "begun", folder / str(length), length)
        found = reporting.in_turn({str(n): partial(start_seconds, folder / str(n), n)
                                  for n in options.lengths}, options.rounds)
        readings = {saves: memory(saves, options.steps, name) for saves in SAVES}
    first = statistics.median(found[str(options.lengths[0])])
    print(reporting.table(["recorded steps", "s to the first new step", "more than the shortest"], [
        [f"{n:,}", reporting.spread(reporting.summary(found[str(n)]), digits=3),
         f"{statistics.median(found[str(n)]) - first:+.3f} s"] for n in options.lengths]) + "\n")
    growth = {saves: 10_000 * statistics.linear_regression(
        *zip(*pairs[len(pairs) // 2 :], strict=True)).slope
              for saves, pairs in readings.items()}
    print(reporting.table(["saves", "MB at the start", "half-way", "end", "MB per 10,000 steps"], [
        [saves, *(f"{pairs[i][1]:.1f}" for i in (0, len(pairs) // 2, -1)), f"{growth[saves]:.2f}"]
        for saves, pairs in readings.items()]))
    reporting.print_json("long_run", machine=machine, starts=found, mb_per_10000_steps=growth)


if __name__ == "__main__":
    reporting.finish(main)
