"""Does a run whose number of ranks changes, and whose ranks are killed, end with the same bits?

    python -m benchmarks.elastic --runs 100 [--seed N] [--keep FOLDER]

Each run trains the task of `benchmarks.chaos` with `--parallel.reduction canonical`. Each start has
a random number of ranks (1 to 4) and ends by SIGKILL of a rank at a named place or at any moment,
or by a stop. At the end weights, optimizer, progress, metrics.jsonl and the final model are
compared with those of an undisturbed run on one rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from benchmarks import reporting
from benchmarks.chaos_plan import IN_STEP, STEPS, Setting
from benchmarks.chaos_run import Launcher, differences, ends
from trainer.errors import EXIT_COMPLETE

LIMIT_S = 120.0  # for a whole run
MOST_RANKS, CHANGES = 4, 4
CANONICAL = ("--parallel.reduction", "canonical")


def disturbed(setting: Setting, folder: Path, launcher: Launcher, draw: random.Random) -> list[str]:
    """Train, each start on another number of ranks; what happened, start by start.

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
        arguments = [*setting.arguments(str(folder)), *CANONICAL]
        if kind in ("kill", "term"):
            arguments += ["--inject", f"{kind}:rank={rank}:step={step}:phase={phase}"]
        pid = launcher.start(ranks, arguments, folder.with_suffix(".log"))
        while kind == "rank" and not ends(pid, delay_s if victims else 0.01):
            if victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[rank], signal.SIGKILL)
                break
            found = sorted(launcher.ranks(pid))
            victims = found if len(found) == ranks else []
        if not ends(pid, max(1.0, deadline_s - time.monotonic())):
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told.append(f"{ranks} ranks, {kind}, exit code {code}")
        if code == EXIT_COMPLETE:
            return told
    raise RuntimeError(f"not complete after {LIMIT_S:.0f} s: {told[:20]}; see "
                       f"{folder.with_suffix('.log')}")


def same_bits(runs: int, seed: int, folder: Path) -> bool:
    """Run and compare; whether all have the same bits."""
    launcher, draw = Launcher("launch", max_restarts=0), random.Random(seed)
    references: dict[int, Path] = {}
    same = starts = kills = 0
    began_s = time.monotonic()
    for number in range(1, runs + 1):
        setting = Setting(ranks=1, micro_batches=draw.choice((4, 6, 7)), sync_bn="auto",
                          workers=draw.choice((0, 2)), seed=0)
        size = setting.micro_batches
        if size not in references:
            references[size] = folder / f"straight-{size}"
            arguments = [*setting.arguments(str(references[size])), *CANONICAL,
                         "--data.workers", "0"]
            os.waitpid(launcher.start(1, arguments, folder / f"straight-{size}.log"), 0)
        path = folder / f"run-{number}"
        told = disturbed(setting, path, launcher, draw)
        found = differences(references[size], path)
        starts += len(told)
        kills += sum("code 1" in line or "code -" in line for line in told)
        same += not found
        print(f"{number}: M={size} workers={setting.workers}: "
              f"{'; '.join(told)}: {found[0] if found else 'same bits'}", flush=True)
        if not found:
            shutil.rmtree(path)
    print(f"{same} of {runs} runs with the same bits: {starts} starts on 1 to {MOST_RANKS} ranks, "
          f"{kills} of them ended by SIGKILL, {time.monotonic() - began_s:.0f} s")
    reporting.print_json("elastic", runs=runs, same=same, starts=starts, kills=kills, seed=seed)
    return same == runs


def main() -> int:
    parser = reporting.parser("elastic", __doc__)
    parser.add_argument("--runs", type=int, default=10, help="disturbed runs (10)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens to them (1)")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that differ stay")
    options = parser.parse_args()
    # No TemporaryDirectory: a rank, forked from here, would remove it at its end.
    folder = Path(options.keep or tempfile.mkdtemp(prefix="elastic-"))
    folder.mkdir(parents=True, exist_ok=True)
    same = same_bits(options.runs, options.seed, folder)
    if same and options.keep is None:
        shutil.rmtree(folder)
    return int(not same)


if __name__ == "__main__":
    reporting.finish(main)
