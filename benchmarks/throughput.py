"""How long is a step, compared with the loop by hand, Lightning, accelerate and the usual loop?

    python -m benchmarks.throughput [--models mlp,cnn,resnet18] [--ranks 1,2] [--minutes 15]

All contestants are started and then take turns, a block of steps each, in an order that rotates by
one each round. A ratio is that of two blocks of the same round; the median over all rounds has a
95 % interval by bootstrap. The control is a second loop by hand. All are started several times: two
processes of the same code differ by up to 5 %, by where their memory lies.
"""

from __future__ import annotations

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
from benchmarks.peers import NAMES, WORKS
from benchmarks.reporting import interval, ratios

ALWAYS = ("by-hand", "control", "trainer")
ONLY = {"usual": "cnn", "lightning-logging": "mlp", "accelerate-logging": "mlp"}
"""Contestants of one model."""
PEERS = ("lightning", "accelerate", *ONLY)
STARTS = 3
START_S = 120.0


class Contestant:
    """The processes of one contestant of `benchmarks.peers`."""

    def __init__(self, name: str, model: str, ranks: int, folder: Path) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        self._connections: list[socket.socket] = []
        path, threads = str(folder / f"{name}.socket"), len(os.sched_getaffinity(0)) // ranks
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen(ranks)
        server.settimeout(START_S)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc_per_node={ranks}", "-m", "benchmarks.peers", name, model, path,
                 str(folder / name)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=reporting.environment(OMP_NUM_THREADS=str(max(1, threads))),
            )  # fmt: skip
        try:
            for _ in range(ranks):
                self._connections.append(server.accept()[0])
            self._files = [connection.makefile("rw") for connection in self._connections]
            self._answers()
        except TimeoutError:
            self.close()
            raise SystemExit(f"{name} did not start:\n{self._log.read_text()[-3000:]}") from None

    def run(self, steps: int) -> float:
        """Seconds per step of a block of steps, of the slowest rank."""
        for file in self._files:
            file.write(f"{steps}\n")
            file.flush()
        return max(self._answers()) / steps

    def close(self) -> None:
        """End the processes: they exit when their connection closes."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> list[float]:
        try:
            return [float(file.readline()) for file in self._files]
        except ValueError:
            raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-3000:]}") from None


def compare(model: str, ranks: int, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """Rounds of blocks of all contestants, in `STARTS` starts of all of them."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(STARTS):
        run_rounds(model, ranks, times, seconds / STARTS)
    return {"seconds": {name: reporting.summary(own) for name, own in times.items()},
            "to_hand": {name: interval(ratios(own, times["by-hand"]))
                        for name, own in times.items()},
            "to_trainer": {name: interval(ratios(own, times["trainer"]))
                           for name, own in times.items()}}


def run_rounds(model: str, ranks: int, times: dict[str, list[float]], seconds: float) -> None:
    """Start all contestants, and let them run in rounds until the time is up; note their times."""
    block, end_s = WORKS[model].block, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contestants = []
        for name in times:
            contestants.append(Contestant(name, model, ranks, Path(folder)))
            stack.callback(contestants[-1].close)
        for contestant in contestants:
            contestant.run(block)  # to warm up
        while True:
            for contestant in contestants:
                times[contestant.name].append(contestant.run(block))
            contestants.append(contestants.pop(0))
            if time.monotonic() > end_s:
                return


def main() -> None:
    parser = reporting.parser("throughput", __doc__)
    parser.add_argument("--models", type=reporting.some_of(WORKS), default=",".join(WORKS),
                        help="(%(default)s)")
    parser.add_argument("--ranks", type=reporting.numbers, default="1,2", help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=15, help="of all rounds together (15)")
    parser.add_argument("--contestants", type=reporting.some_of(NAMES), default=",".join(PEERS),
                        help="in addition to by-hand, control and trainer, of "
                             f"{', '.join(NAMES)} (%(default)s)")
    options = parser.parse_args()
    machine, contestants = reporting.machine(), reporting.installed(options.contestants)
    pairs = [(model, int(ranks)) for model in options.models for ranks in options.ranks]
    found = {}
    for model, ranks in pairs:
        names = [name for name in NAMES if name in (*ALWAYS, *contestants)
                 and ONLY.get(name, model) == model]
        result = compare(model, ranks, names, 60 * options.minutes / len(pairs))
        found[f"{model}, W = {ranks}"] = result
        rows = [[f"{model}, W = {ranks}: {name}", f"{result['seconds'][name]['n']}",
                 reporting.spread(result["seconds"][name], 1e3, 3),
                 reporting.within(result["to_hand"][name]),
                 reporting.within(result["to_trainer"][name])] for name in names]
        print(reporting.table(["", "blocks", "step, ms", "× by hand", "× trainer"], rows),
              flush=True)
    reporting.print_json("throughput", machine=machine, found=found)


if __name__ == "__main__":
    reporting.finish(main)
