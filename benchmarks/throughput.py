"""How long is a step of this trainer, with everything on, beside the same loop by hand, Lightning,
accelerate, and the loop as most people write it?

    python -m benchmarks.throughput [--models mlp,cnn,resnet18] [--ranks 1,2] [--minutes 15]

Everything on: metrics.jsonl each step, TensorBoard every 50, the watchdog, checksums of the ranks
every 100, and in each block of 50 steps (500 of the MLP) a checkpoint, whose way to the disk is
waited for. The others save, log and watch nothing; with -logging (on the MLP) Lightning and
accelerate log each step and save in each block too, by their own means, not durably.

All contestants are started and stand still; then they take turns, a block of steps each, in an
order that moves on by one from round to round. A ratio is that of two blocks of the same round; the
median of all rounds has its interval by bootstrap (95 %). The loop by hand runs twice, as control:
the rounds of a model end when the control's interval is within 1 %, or its share of the time is up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.peers import WORKS
from benchmarks.reporting import interval

NAMES = ("by-hand", "control", "trainer", "lightning", "accelerate", "lightning-logging",
         "accelerate-logging", "usual")
ONLY = {"usual": "cnn", "lightning-logging": "mlp", "accelerate-logging": "mlp"}
"""Contestants of one model only."""
WARM_UP, LEAST = 1, 5
"""Blocks that aren't counted; rounds that there are at least."""

START_S = 120.0
CLOSE = 0.01
"""Half of the width of the control's interval at which the rounds end."""


class Contestant:
    """The processes of one contestant."""

    def __init__(self, name: str, model: str, ranks: int, folder: Path) -> None:
        self.name, self.seconds = name, list[float]()
        self._connections: list[socket.socket] = []
        path = str(folder / f"{name}.socket")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(ranks)
        server.settimeout(START_S)
        log = (folder / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={ranks}", "-m", "benchmarks.peers", name, model, path,
             str(folder / name)],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))},
        )  # fmt: skip
        try:
            for _ in range(ranks):
                self._connections.append(server.accept()[0])
            self._files = [connection.makefile("rw") for connection in self._connections]
            for file in self._files:
                self._read(file)
        except (TimeoutError, ValueError):
            self.close()
            raise SystemExit(f"{name} didn't start:\n{_end_of(Path(log.name))}") from None
        self._log = Path(log.name)

    def run(self, steps: int) -> float:
        """Make a block of steps; its seconds, of the slowest rank."""
        for file in self._files:
            file.write(f"{steps}\n")
            file.flush()
        try:
            return max(float(self._read(file)["seconds"]) for file in self._files)
        except ValueError:
            raise SystemExit(f"{self.name} ended:\n{_end_of(self._log)}") from None

    def close(self) -> None:
        """End the processes, which leave where nobody tells them to go on."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @staticmethod
    def _read(file: Any) -> dict[str, Any]:
        return dict(json.loads(file.readline()))


def compare(model: str, ranks: int, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Rounds of blocks of all contestants, until the control is close or the time is up."""
    block, end = WORKS[model].block, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contestants = []
        for name in names:
            contestants.append(Contestant(name, model, ranks, Path(folder)))
            stack.callback(contestants[-1].close)
        for _ in range(WARM_UP):
            for contestant in contestants:
                contestant.run(block)
        by_name = {c.name: c for c in contestants}
        while True:
            for contestant in contestants:
                contestant.seconds.append(contestant.run(block) / block)
            contestants.append(contestants.pop(0))
            rounds = len(contestants[0].seconds)
            hand = by_name["by-hand"].seconds
            _, low, high = interval(_ratios(by_name["control"].seconds, hand), 500)
            close = rounds >= LEAST and high - low <= 2 * CLOSE
            if close or (rounds >= 3 and time.monotonic() > end):
                break
        return {"seconds": {c.name: reporting.summary(c.seconds) for c in by_name.values()},
                "to_hand": {c.name: interval(_ratios(c.seconds, hand)) for c in by_name.values()},
                "to_trainer": {c.name: interval(_ratios(c.seconds, by_name["trainer"].seconds))
                               for c in by_name.values()}}


def _end_of(log: Path) -> str:
    return log.read_text()[-3000:]


def _ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(some, others, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,cnn,resnet18", help="which of " + ", ".join(WORKS))
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--minutes", type=float, default=15, help="of all rounds together (15)")
    parser.add_argument("--contestants", default=",".join(NAMES),
                        help="besides by-hand, control and trainer: lightning, accelerate; with "
                             "the MLP both with -logging too, with the CNN usual")
    options = parser.parse_args()
    machine = reporting.machine()
    pairs = [(m, int(w)) for m in options.models.split(",") for w in options.ranks.split(",")]
    rows, found = [], {}
    for model, ranks in pairs:
        wanted = {*NAMES[:3], *options.contestants.split(",")}
        names = [n for n in NAMES if n in wanted and ONLY.get(n, model) == model]
        result = compare(model, ranks, names, 60 * options.minutes / len(pairs))
        found[f"{model}, W = {ranks}"] = result
        for name in names:
            rows.append([f"{model}, W = {ranks}: {name}", f"{result['seconds'][name]['n']:.0f}",
                         reporting.spread(result["seconds"][name], 1e3, 3),
                         *("{:.3f} ({:.3f} – {:.3f})".format(*result[to][name])
                           for to in ("to_hand", "to_trainer"))])
    print(reporting.describe(machine))
    print(reporting.table(["", "blocks", "step, ms", "× by hand", "× trainer"], rows))
    reporting.print_json("throughput", machine=machine, results=found)


if __name__ == "__main__":
    reporting.finish(main)
