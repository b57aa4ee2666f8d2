"""What several ranks are worth: this trainer and bare DDP against processes that don't talk.

    python -m benchmarks.scaling [--ranks 1,2] [--rounds N] [--sync-bn off] [--quick] [--json]

In each of W ranks there are, of the small CNN on the bundled sample, with cores / W threads:

trainer       a run of this trainer, with all that it does (checkpoints every 100 steps, metrics,
              watchdog), no validation, and as in bare DDP no synchronised batch norm
bare DDP      the functions of examples/bare_loop.py under DistributedDataParallel
independent   the same loop with as many micro-batches a rank and without DDP: what W processes
              do that share the machine and nothing else

They take turns in blocks of steps, with a barrier before each block. A block's time is that of the
rank that took longest. One block in ten holds a checkpoint, which the medians don't show; the ratio
of all blocks together does.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.ranks import in_ranks
from benchmarks.turns import ratios

BLOCK = 10
"""Steps of each in turn."""
WARM_BLOCKS = 2
WANTED = 0.98
NAMES = ("trainer", "bare DDP", "independent")


class Bare:
    """The steps of examples/bare_loop.py in one rank, epoch after epoch."""

    def __init__(self, rank: int, num_ranks: int, *, ddp: bool) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        from examples import bare_loop

        self._loop = bare_loop
        self._accumulation = bare_loop.GLOBAL_SIZE // bare_loop.MICRO_SIZE // num_ranks
        data = bare_loop.load_data(0)[0]
        torch.manual_seed(0)
        plain = bare_loop.make_model()
        self._model = DistributedDataParallel(plain) if ddp and num_ranks > 1 else plain
        self._optimizer = bare_loop.make_optimizer(plain)
        self._schedule = bare_loop.make_schedule(self._optimizer, 100_000)
        sampler = DistributedSampler(data, num_ranks, rank, seed=0, drop_last=True)
        loader = DataLoader(data, bare_loop.MICRO_SIZE, sampler=sampler, drop_last=True,
                            collate_fn=lambda batch: batch)
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def steps(self, count: int) -> None:
        """Make so many."""
        for _ in range(count):
            window = itertools.islice(self._batches, self._accumulation)
            self._loop.train_step(self._model, self._optimizer, self._schedule, window,
                                  self._accumulation)


def measure(launch: Any, rounds: int, sync_bn: str, folder: str, threads: int) -> Any:
    """In a rank: seconds of each block, by contestant."""
    from trainer.config import command_line
    from trainer.distributed.world import World
    from trainer.loop import train
    from trainer.resilience.stop_signals import StopSignals
    from trainer.resilience.watchdog import Watchdog
    from trainer.run.build import build
    from trainer.run.warmup import start as warm_up
    from trainer.telemetry.events import Log

    steps = (rounds + WARM_BLOCKS) * BLOCK
    config = command_line.parse_config(["sample", f"--steps={steps}", "--eval.every=off",
                                        "--device=cpu",
                                        f"--run-dir={folder}/run", f"--parallel.sync-bn={sync_bn}",
                                        "--task.label-smoothing=0",  # as the bare loop
                                        "--log.level=error"])
    log = Log(launch.rank, level="error")
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    with (World.form(device="cpu", threads=threads, launch=launch) as world,
          Watchdog(world, log, limit_s=None) as watchdog):
        built = build(config, world, log, StopSignals(), watchdog.marks)
        others = {"bare DDP": Bare(world.rank, world.size, ddp=True),
                  "independent": Bare(world.rank, world.size, ddp=False)}
        clock = time.perf_counter
        began = [clock()]

        def mark(step: int) -> None:
            if step % BLOCK == 0:
                counts = step > WARM_BLOCKS * BLOCK
                if counts:
                    found["trainer"].append(clock() - began[0])
                for name, other in others.items():
                    world.barrier()
                    start = clock()
                    other.steps(BLOCK)
                    if counts:
                        found[name].append(clock() - start)
                world.barrier()
                began[0] = clock()

        log.status.on_step(mark)
        train(warm_up(built))
        built.guard.close()
    return found


def summarise(ranks: list[dict[str, list[float]]], global_size: int = 128) -> dict[str, Any]:
    """Steps a second by the slowest rank of each block, and the ratios block by block."""
    times = {name: [max(block) for block in zip(*(rank[name] for rank in ranks), strict=True)]
             for name in NAMES}
    return {
        "samples_per_s": {name: reporting.summary([BLOCK * global_size / s for s in seconds])
                          for name, seconds in times.items()},
        "ours_over_ddp": reporting.summary(ratios(times["bare DDP"], times["trainer"])),
        "ours_over_ddp_total": sum(times["bare DDP"]) / sum(times["trainer"]),
        "of_independent": {name: reporting.summary(ratios(times["independent"], times[name]))
                           for name in ("trainer", "bare DDP")},
    }  # fmt: skip


def show(found: dict[int, dict[str, Any]]) -> str:
    rows = []
    for ranks, side in found.items():
        for name in NAMES:
            share = side["of_independent"].get(name)
            rows.append([
                f"W = {ranks}: {name}", reporting.spread(side["samples_per_s"][name], digits=0),
                "–" if share is None else reporting.spread(share, digits=3),
                reporting.spread(side["ours_over_ddp"], digits=3) if name == "trainer" else "–",
            ])  # fmt: skip
    return reporting.table(["", "samples/s", "of independent", "of bare DDP"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", help="W, each a divisor of 4; default: 1, 2 and, with as many "
                        "cores, 4")
    parser.add_argument("--rounds", type=int, default=16, help=f"blocks of {BLOCK} (%(default)s)")
    parser.add_argument("--sync-bn", choices=("off", "auto"), default="off",
                        help="the trainer's batch norm (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 rounds")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    machine = reporting.machine()
    cores = machine["cores"]
    sizes = [1, 2, *([4] if cores >= 4 else [])]
    if options.ranks:
        sizes = [int(text) for text in options.ranks.split(",")]
        if unfit := [size for size in sizes if size not in (1, 2, 4)]:
            parser.error(f"--ranks: {unfit[0]} ranks can't share 4 micro-batches; use 1, 2 or 4.")
    rounds = 4 if options.quick else options.rounds
    found = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = summarise(in_ranks(measure, size, rounds, options.sync_bn,
                                             str(Path(folder)), max(1, cores // size)))
    if not options.json:
        print(reporting.describe(machine) + f"; n = {rounds} blocks of {BLOCK} steps, "
              f"the trainer's batch norm: {options.sync_bn}\n")
        print(show(found))
        for size, side in found.items():
            if size > 1:
                print(f"\nW = {size}: {side['ours_over_ddp']['median']:.3f} of bare DDP, of all "
                      f"blocks together {side['ours_over_ddp_total']:.3f} (wanted: {WANTED} or "
                      "more)")
    reporting.print_json("scaling", machine=machine, sync_bn=options.sync_bn, ranks=found)


if __name__ == "__main__":
    reporting.finish(main)
