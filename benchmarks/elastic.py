"""Does a run whose number of ranks changes while ranks are killed end with the same bits, and what
does that cost?

    python -m benchmarks.elastic --runs 100 [--seed N] [--keep FOLDER]
    python -m benchmarks.elastic --cost [--steps N] [--models cnn,resnet18]

`--runs`: each run trains the task of `benchmarks.chaos` with `--parallel.reduction canonical` and a
random number of ranks (1 to 4) at each start; each start ends by the SIGKILL of a rank at a named
place or at any moment, or by a stop. In the end weights, optimizer, progress,
metrics.jsonl and the product are compared with those of an undisturbed run on one rank.

`--cost`: the time of a step beside that of DDP's all-reduce with the same number of ranks. Both are
built in the same processes and take turns, step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import reporting
from benchmarks.chaos_plan import IN_STEP, STEPS, Setting
from benchmarks.chaos_run import Launcher, in_child
from trainer.errors import EXIT_COMPLETE

LIMIT_S = 120.0
"""For a whole run."""

MOST_RANKS, CHANGES = 4, 4

COST = {
    "cnn": ["--batch.global-size=128", "--batch.micro-size=32"],
    "resnet18": ["--task.model=resnet18", "--batch.global-size=64", "--batch.micro-size=16"],
}  # fmt: skip
"""The default recipe's small CNN, and ResNet-18 on its images."""

REDUCTIONS = ("ddp", "canonical")


def disturbed(setting: Setting, folder: Path, launcher: Launcher, draw: random.Random) -> list[str]:
    """Train, each start with another number of ranks; what happened, start by start.

    Raises:
        RuntimeError: the run isn't complete in time.
    """
    deadline_s, told, step = time.monotonic() + LIMIT_S, list[str](), 0
    while time.monotonic() < deadline_s:
        ranks, kind = draw.randint(1, MOST_RANKS), draw.choice(("kill", "kill", "rank", "term"))
        step = min(step + draw.randint(2, 8), STEPS)
        rank, phase = draw.randrange(ranks), draw.choice(IN_STEP)
        delay_s, victims = draw.uniform(0.0, 2.0), list[int]()
        if len(told) >= CHANGES:
            kind = "none"
        arguments = [*setting.arguments(str(folder)), "--parallel.reduction", "canonical"]
        if kind in ("kill", "term"):
            arguments += ["--inject", f"{kind}:rank={rank}:step={step}:phase={phase}"]
        pid = launcher.start(ranks, arguments, folder.with_suffix(".log"))
        while kind == "rank" and not _ends(pid, delay_s if victims else 0.01):
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[rank], signal.SIGKILL)
                break
            found = sorted(launcher.ranks(pid))
            victims = found if len(found) == ranks else []
        if not _ends(pid, max(1.0, deadline_s - time.monotonic())):
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told.append(f"{ranks} ranks, {kind}, exit code {code}")
        if code == EXIT_COMPLETE:
            return told
    raise RuntimeError(f"not complete after {LIMIT_S:.0f} s: {told[:20]}; see "
                       f"{folder.with_suffix('.log')}")


def _ends(pid: int, timeout_s: float) -> bool:
    """Whether a child process ends within that time."""
    pidfd = os.pidfd_open(pid)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def _differences(first: str, second: str) -> list[str]:
    import torch

    from trainer.commands.compare import differences

    torch.set_num_threads(1)
    return list(differences(Path(first), Path(second)))


def same_bits(runs: int, seed: int, folder: Path) -> bool:
    """Run and compare; whether all have the same bits."""
    launcher, draw = Launcher("launch", max_restarts=0), random.Random(seed)
    references: dict[str, Path] = {}
    same = starts = kills = 0
    began_s = time.monotonic()
    for number in range(1, runs + 1):
        setting = Setting(ranks=1, micro_batches=draw.choice((4, 6, 7)), sync_bn="auto",
                          workers=draw.choice((0, 2)), seed=0)
        key = str(setting.micro_batches)
        if key not in references:
            references[key] = folder / f"straight-{key}"
            arguments = [*setting.arguments(str(references[key])), "--parallel.reduction",
                         "canonical", "--data.workers", "0"]
            pid = launcher.start(1, arguments, folder / f"straight-{key}.log")
            os.waitpid(pid, 0)
        path = folder / f"run-{number}"
        told = disturbed(setting, path, launcher, draw)
        found = in_child(lambda: _differences(str(references[key]), str(path)))  # noqa: B023
        starts += len(told)
        kills += sum("code 1" in line or "code -" in line for line in told)
        same += not found
        print(f"{number}: M={setting.micro_batches} workers={setting.workers}: "
              f"{'; '.join(told)}: {found[0] if found else 'same bits'}", flush=True)
        if not found:
            shutil.rmtree(path)
    print(f"{same} of {runs} runs with the same bits: {starts} starts on 1 to {MOST_RANKS} ranks, "
          f"{kills} of them ended by SIGKILL, {time.monotonic() - began_s:.0f} s")
    reporting.print_json("elastic", runs=runs, same=same, starts=starts, kills=kills, seed=seed)
    return same == runs


def measure(model: str, steps: int, folder: Path) -> None:
    """Collective, in a rank: rank 0 prints, as JSON, by reduction (seconds, seconds of processor
    time of all its threads) of each step."""
    from trainer.config import command_line
    from trainer.distributed.world import LaunchInfo, World
    from trainer.resilience.stop_signals import StopSignals
    from trainer.resilience.watchdog import Watchdog
    from trainer.run.build import build
    from trainer.run.warmup import start
    from trainer.telemetry.events import Log

    log = Log(level="warning")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in REDUCTIONS}
    with (World.form(device="cpu", threads=1, launch=LaunchInfo.from_environment()) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        built = {}
        for name in REDUCTIONS:
            config = command_line.parse_config([
                *COST[model], f"--steps={steps + 3}", "--device=cpu", "--data.workers=0",
                f"--run-dir={folder / name}", "--log.level=warning", "--parallel.sync-bn=off",
                f"--parallel.reduction={name}"])  # fmt: skip
            built[name] = start(build(config, world, log, StopSignals(), watchdog.marks))
        for number in range(steps + 2):
            for name in REDUCTIONS if number % 2 else reversed(REDUCTIONS):
                training = built[name].training
                world.barrier()
                began_s, cpu_s = time.perf_counter(), time.process_time()
                training.step(training.loader.window())
                if number >= 2:
                    times[name].append((time.perf_counter() - began_s,
                                        time.process_time() - cpu_s))
        if world.is_main:
            print(json.dumps(times), flush=True)
        world.barrier()


def cost(models: list[str], steps: int) -> None:
    """Measure with one rank and with two, and print."""
    machine, rows, found = reporting.machine(), [], {}
    for model in models:
        for size in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                times = _in_ranks(model, size, steps, folder)
            wall, cpu = ({name: [pair[i] for pair in pairs] for name, pairs in times.items()}
                         for i in (0, 1))
            more = {"medians": _more(wall), "processor": _more(cpu), "pairs": statistics.median(
                c / d for d, c in zip(wall["ddp"], wall["canonical"], strict=True)) - 1}
            found[f"{model} on {size}"] = more | {
                name: reporting.summary(wall[name]) for name in REDUCTIONS}
            rows.append([f"{model}, {size} rank{'s' * (size > 1)}", str(steps),
                         *(reporting.spread(reporting.summary(wall[name]), 1e3, 1)
                           for name in REDUCTIONS),
                         *(f"{100 * value:+.1f} %" for value in more.values())])
    print(reporting.describe(machine))
    print(reporting.table(["model", "n", "ddp, ms", "canonical, ms", "medians", "processor time",
                           "pairs"], rows))
    reporting.print_json("elastic-cost", machine=machine, found=found)


def _more(times: dict[str, list[float]]) -> float:
    """By what part the median is larger."""
    return statistics.median(times["canonical"]) / statistics.median(times["ddp"]) - 1


def _in_ranks(model: str, size: int, steps: int, folder: str) -> dict[str, list[list[float]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.elastic", "--measure", folder, "--models", model,
               "--steps", str(steps)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1"})
        for rank in range(size)
    ]  # fmt: skip
    texts = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{model} on {size} ranks failed: see above")
    return json.loads(texts[0].splitlines()[-1])


def main() -> None:
    """Run or measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="disturbed runs (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens to them (1)")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that differ stay")
    parser.add_argument("--cost", action="store_true", help="measure the time of a step instead")
    parser.add_argument("--steps", type=int, default=60, help="of each reduction (60)")
    parser.add_argument("--models", default=",".join(COST), help="which of cnn, resnet18")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.models.split(",")
    if options.measure is not None:
        measure(models[0], options.steps, options.measure)
    elif options.cost:
        cost(models, options.steps)
    else:
        # No TemporaryDirectory: a rank, forked from here, would remove it at its end.
        folder = Path(options.keep or tempfile.mkdtemp(prefix="elastic-"))
        folder.mkdir(parents=True, exist_ok=True)
        same = same_bits(options.runs, options.seed, folder)
        if same and options.keep is None:
            shutil.rmtree(folder)
        sys.exit(not same)


if __name__ == "__main__":
    reporting.finish(main)
