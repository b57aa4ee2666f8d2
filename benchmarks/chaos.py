"""Do runs that are disturbed in every way end with the same bits as undisturbed ones?

    python -m benchmarks.chaos --faults 40 --seed 1 [--soak]
    python -m benchmarks.chaos --mirror --faults 24 --seed 1
    python -m benchmarks.chaos --elastic --faults 40 --seed 1

Disturbs runs until this many faults have happened, up to 8 per run, and compares each run with an
undisturbed one of the same configuration. With --mirror the run has a mirror in an object store,
and loses all disks; up to 4 faults per run. With --elastic each launch has another number of ranks.
Exit code 0: all have the same bits; 1: some have not.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import chaos_plan as plans
from benchmarks import reporting
from benchmarks.chaos_mirror import MirrorWatch
from benchmarks.chaos_plan import Fault, Run, Setting
from benchmarks.chaos_run import MAX_RESTARTS, ElasticWatch, Launcher, Watch, differences
from benchmarks.chaos_store import FaultyStore

LIMIT_S, LIMIT_A_FAULT_S = 120.0, 40.0
"""A run is stuck if it is not complete after the first plus the second for each of its faults."""
COLD = 3  # factor of these limits if each start imports everything


def main() -> int:
    options = _parse()
    draw = random.Random(options.seed)
    deal = functools.partial(plans.plan, cards=plans.deck(draw, options.mode), left=[], draw=draw,
                             seed=options.seed, mode=options.mode)
    runs = [deal(number, count)
            for number, count in enumerate(plans.sizes(options.faults, options.mode))]
    if options.only is not None:
        runs = [run for run in runs if run.number == options.only]
    wanted = sum(len(run.faults) for run in runs)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    store = FaultyStore(options.seed) if options.mode == "mirror" else None
    launcher = Launcher(options.launcher,
                        max_restarts=0 if options.mode == "elastic" else MAX_RESTARTS)
    chaos = Chaos(folder, launcher, keep=options.keep is not None, store=store)
    for _ in range(1 + wanted):
        for run in runs:
            chaos.disturb(run)
        missing = wanted - len(chaos.fired)
        if not missing or options.only is not None:
            break
        # Others take the place of faults whose place was never reached.
        first = len(chaos.results)
        runs = [deal(first + place, count + (store is not None))
                for place, count in enumerate(plans.sizes(missing, options.mode))]
    chaos.summarize(wanted)
    if not chaos.all_same:
        print(f"the runs that differ, and their output, are in {folder}")
    elif not options.keep:
        shutil.rmtree(folder)
    print(chaos.verdict(wanted), flush=True)
    return 0 if chaos.all_same and len(chaos.fired) >= wanted else 1


class Chaos:
    """The runs so far. Run folders that differ stay in `folder`, with `keep` all of them."""

    def __init__(self, folder: Path, launcher: Launcher, *, keep: bool,
                 store: FaultyStore | None) -> None:
        self.results: list[tuple[Run, Watch, int, list[str]]] = []
        """Each run, its watch, its starts, and what is wrong with it."""
        self._folder, self._launcher, self._keep, self._store = folder, launcher, keep, store
        self._references: dict[tuple[Setting, tuple[Fault, ...]], tuple[Path, float]] = {}
        self._undisturbed_s = 0.0
        self._began_s = time.monotonic()

    @property
    def fired(self) -> list[Fault]:
        return [fault for _, watch, *_ in self.results for fault in watch.fired]

    @property
    def all_same(self) -> bool:
        return not any(wrong for *_, wrong in self.results)

    def disturb(self, run: Run) -> None:
        """Make one run and its reference, compare them, and print the result."""
        reference, wall_s = self._reference(run)
        self._undisturbed_s += wall_s
        path = self._folder / f"run-{run.number}"
        kind = ElasticWatch if run.setting.mode == "elastic" else Watch
        watch = (kind(run, path, self._launcher) if self._store is None else
                 MirrorWatch(run, path, self._launcher, self._store))
        problem = self._train(watch)
        wrong = [problem] if problem else differences(reference, watch.folder)
        self.results.append((run, watch, watch.starts(), wrong))
        missed = [fault for fault in run.faults if fault not in watch.fired]
        print(f"run {run.number}: {run.setting}: {len(watch.fired)} faults, {watch.starts()} "
              f"starts by {len(watch.sizes)} launches, {watch.wall_s:.1f} s: "
              f"{'; '.join(wrong) or 'same bits'}")
        print("    " + "  ".join(str(fault) for fault in watch.fired))
        if missed:
            print(f"    did not happen: {'  '.join(str(fault) for fault in missed)}")
        sys.stdout.flush()
        if not wrong and not self._keep:
            for made in self._folder.glob(f"{path.name}[.-]*"):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            shutil.rmtree(path)

    def summarize(self, wanted: int) -> None:
        """Print how often each kind and each phase occurred, and the cost."""
        kinds = collections.Counter(fault.kind for fault in self.fired)
        phases = collections.Counter(f.phase for f in self.fired if f.phase is not None)
        sizes = collections.Counter(n for _, watch, *_ in self.results for n in watch.sizes)
        for what, counts in (("kinds", kinds), ("phases", phases), ("launches by ranks", sizes)):
            print(f"{what}: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
        if self._store is not None:
            lost = sum(any(fault.kind in plans.LOSSES for fault in watch.fired)
                       for _, watch, *_ in self.results)
            print(f"{lost} of {len(self.results)} runs lost all disks")
        starts = sum(starts for _, _, starts, _ in self.results)
        disturbed_s = sum(watch.wall_s for _, watch, *_ in self.results)
        print(f"goodput: undisturbed, these runs take {self._undisturbed_s:.0f} s; they took "
              f"{disturbed_s:.0f} s: {self._undisturbed_s / disturbed_s:.0%}, at a fault every "
              f"{disturbed_s / max(1, len(self.fired)):.1f} s")
        print(f"{len(self.fired)} of {wanted} faults happened; {starts} starts, "
              f"{len(self._references)} reference runs, {time.monotonic() - self._began_s:.0f} s")

    def verdict(self, wanted: int) -> str:
        good = [watch for _, watch, _, wrong in self.results if not wrong]
        faults = sum(len(watch.fired) for watch in good)
        return (f"{faults} of {max(wanted, len(self.fired))} faults, {len(good)} of "
                f"{len(self.results)} runs: same bits")

    def _reference(self, run: Run) -> tuple[Path, float]:
        """Folder and seconds of the undisturbed run. It has no loader workers, which do not change
        bits."""
        key = (dataclasses.replace(run.setting, workers=0),
               tuple(fault for fault in run.faults if fault.kind in plans.LASTING))
        if key not in self._references:
            path = self._folder / f"reference-{len(self._references)}"
            run = Run(number=0, setting=key[0], faults=key[1])
            watch = Watch(run, path, self._launcher)
            if (problem := self._train(watch)) or watch.starts() != 1:
                raise SystemExit(f"{key[0]}, undisturbed: {problem or 'started twice'}; "
                                 f"see {path.with_suffix('.log')}")
            self._references[key] = path, watch.wall_s
        return self._references[key]

    def _train(self, watch: Watch) -> str | None:
        limit_s = LIMIT_S + LIMIT_A_FAULT_S * watch.faults
        return watch.train(limit_s=limit_s if self._launcher.kind == "launch" else COLD * limit_s)


def _parse() -> argparse.Namespace:
    parser = reporting.parser("chaos", __doc__)
    parser.add_argument("--faults", type=int, default=40, metavar="N",
                        help="number of faults, 1 or more (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S",
                        help="of the plan and of the runs")
    mode = parser.add_mutually_exclusive_group()
    for name, told in (("soak", "also kinds that take long"),
                       ("mirror", "with --checkpoint.mirror: the network and the store fail, and "
                                  "all disks are lost"),
                       ("elastic", "another number of ranks at each launch")):
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name, default="",
                          help=told)
    parser.add_argument("--launcher", choices=("launch", "launch-cold", "torchrun"),
                        default="launch", help="launch (default): python -m launch, forked from a "
                        "process that has imported everything; launch-cold: a new process each "
                        "time; torchrun")
    parser.add_argument("--keep", metavar="FOLDER", help="keep all run folders, there")
    parser.add_argument("--only", type=int, metavar="K", help="only the run with this number")
    options = parser.parse_args()
    if options.faults < 1:
        parser.error(f"--faults is {options.faults}; use 1 or more")
    return options


if __name__ == "__main__":
    reporting.finish(main)
