"""How fast batches are made, and for how long a step waits for them, by this loader and others.

    python -m benchmarks.loader [--workers 0,2] [--rounds N] [--quick] [--json]

All give batches of 32 images of the bundled sample (28x28), mirrored at random and normalised:

trainer           the keyed loader: whole batches, each draw a function of (seed, epoch, sample)
by hand           examples/bare_loop.py: whole batches in a DataLoader, one unkeyed draw a batch
stateful          the same in torchdata's StatefulDataLoader (left out where it isn't installed)
v2 a batch        torchvision.transforms.v2 on whole batches, in a DataLoader: one coin for all
v2 a sample       torchvision.transforms.v2 on each image, in a DataLoader
PIL a sample      torchvision.transforms on each image as a PIL image, in a DataLoader

They take turns; an iterator lives through all of them, and what its workers have made while others
had their turn is read first and doesn't count. Then the small CNN makes steps of 4 micro-batches
with each: the share of a step in which it waits for data. Batches are read with one thread, as in a
loader's process; the CNN computes with all cores. Without workers the processor time is told too,
which other programs don't prolong.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import reporting
from benchmarks.turns import in_turn, ratios

MICRO, MICRO_BATCHES, CLIP_NORM = 32, 4, 5.0
NAMES = ("trainer", "by hand", "stateful", "v2 a batch", "v2 a sample", "PIL a sample")
AHEAD = 2
"""Batches that each worker makes ahead."""
ENDLESS = 10**9
WANTED_RATIO, WANTED_SHARE = 10.0, 0.03


@dataclass
class Contestant:
    """A loader at work: its batches, and what ends it."""

    batches: Iterator[Any]
    close: Callable[[], None] = lambda: None


def ours(workers: int) -> Contestant:
    """This trainer's loader, as a run has it on the CPU."""
    import torch

    from trainer.data.loader import Loader, SampledSource
    from trainer.data.map_dataset import KeyedSamples
    from trainer.data.sampler import BatchPlan, MicroBatchSampler
    from trainer.resilience.progress_marks import ProgressMarks
    from trainer.tasks.images import Images
    from trainer.telemetry.events import Log

    data = Images().dataset("train")
    assert data is not None
    plan = BatchPlan(samples=len(data), global_size=MICRO * MICRO_BATCHES, micro_size=MICRO,
                     drop_last=True)
    sampler = MicroBatchSampler(plan, rank=0, num_ranks=1, seed=0, shuffle=True, position=0,
                                total_steps=ENDLESS)
    cpu = torch.device("cpu")
    source = SampledSource(KeyedSamples(data, seed=0), sampler=sampler, workers=workers,
                           prefetch=AHEAD, device=cpu)
    loader = Loader(source, device=cpu, marks=ProgressMarks(), log=Log(level="warning"),
                    at_once=not workers)

    def batches() -> Iterator[Any]:
        while True:
            for micro in loader.window():
                yield micro.batch

    return Contestant(batches(), loader.close)


def other(name: str, workers: int) -> Contestant:
    """A DataLoader over one of the data sets below."""
    from torch.utils.data import DataLoader, RandomSampler

    from benchmarks import transformed

    kind: Any = DataLoader
    if name == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    data = transformed.dataset(name)
    loader = kind(
        data, MICRO, sampler=RandomSampler(data, num_samples=ENDLESS), drop_last=True,
        num_workers=workers, prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="fork" if workers else None,
        collate_fn=transformed.unchanged if hasattr(data, "__getitems__") else None,
    )  # fmt: skip
    iterator = iter(loader)
    shut_down = getattr(iterator, "_shutdown_workers", lambda: None)
    return Contestant(iterator, shut_down)


def reader(contestant: Contestant, workers: int, seconds: float, cpu: list[float]
           ) -> Callable[[], float]:
    """Samples a second, measured for so many seconds; samples a second of this process's processor
    time are added to `cpu`."""

    def read() -> float:
        batches, clock = contestant.batches, time.perf_counter
        for _ in range(2 * AHEAD * workers + 2):
            next(batches)
        count, began, began_cpu = 0, clock(), time.process_time()
        while (now := clock()) - began < seconds:
            next(batches)
            count += 1
        cpu.append(count * MICRO / (time.process_time() - began_cpu))
        return count * MICRO / (now - began)

    return read


class Trainee:
    """The small CNN with its optimizer: steps that say how much of them was waiting."""

    def __init__(self) -> None:
        import torch
        from torch.optim.lr_scheduler import LambdaLR

        from trainer.config.schema import Optim
        from trainer.optim import optimizers
        from trainer.tasks.images import Images

        torch.manual_seed(0)
        self._model = Images().model().to(memory_format=torch.channels_last)
        self._optimizer = optimizers.make_optimizer(Optim(), self._model)
        self._schedule = LambdaLR(self._optimizer, lambda step: 1.0)

    def step(self, batches: Iterator[Any], clock: Callable[[], float] = time.perf_counter
             ) -> tuple[float, float]:
        """Seconds of a step by a clock, and of them those spent waiting for its batches."""
        from torch.nn import functional, utils

        waited, began = 0.0, clock()
        self._optimizer.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            asked = clock()
            images, labels = next(batches)
            waited += clock() - asked
            (functional.cross_entropy(self._model(images), labels) / MICRO_BATCHES).backward()
        utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._schedule.step()
        return clock() - began, waited

    def share(self, batches: Iterator[Any], steps: int, clock: Callable[[], float]
              ) -> Callable[[], float]:
        """The share of `steps` steps in which they wait, after one that doesn't count."""

        def measure() -> float:
            self.step(batches)
            times = [self.step(batches, clock) for _ in range(steps)]
            return sum(wait for _, wait in times) / sum(whole for whole, _ in times)

        return measure


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`NAME, W workers` → samples a second, the ratio of ours to it, and the share of waiting."""
    import torch

    names = [name for name in NAMES
             if name != "stateful" or importlib.util.find_spec("torchdata") is not None]
    entrants = {(name, workers): ours(workers) if name == "trainer" else other(name, workers)
                for workers in options.workers for name in names}
    cpu: dict[tuple[str, int], list[float]] = {key: [] for key in entrants}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rates = in_turn({f"{key[0]}, {key[1]} workers":
                     reader(entrant, key[1], options.seconds, cpu[key])
                     for key, entrant in entrants.items()}, options.rounds)
    torch.set_num_threads(threads)
    trainee = Trainee()
    clocks = {"": time.perf_counter, " in processor time": time.thread_time}
    shares = in_turn({f"{name}, {workers} workers{text}":
                      trainee.share(entrant.batches, options.steps, clock)
                      for (name, workers), entrant in entrants.items()
                      for text, clock in clocks.items() if not (workers and text)},
                     options.step_rounds)
    for entrant in entrants.values():
        entrant.close()
    found = {}
    for name, workers in entrants:
        key = f"{name}, {workers} workers"
        found[key] = {
            "samples_per_s": reporting.summary(rates[key]),
            "ours_over_it": reporting.summary(ratios(rates[f"trainer, {workers} workers"],
                                                     rates[key])),
            "waiting": reporting.summary(shares[key]),
        }  # fmt: skip
        if not workers:
            own = cpu[name, 0][1:]  # its first turn didn't count
            found[key]["waiting_cpu"] = reporting.summary(shares[f"{key} in processor time"])
            found[key]["samples_per_cpu_s"] = reporting.summary(own)
            found[key]["ours_over_it_cpu"] = reporting.summary(ratios(cpu["trainer", 0][1:], own))
    return found


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, reporting.spread(f["samples_per_s"], 1e-3), reporting.spread(f["ours_over_it"]),
             reporting.spread(f["ours_over_it_cpu"]) if "ours_over_it_cpu" in f else "–",
             reporting.spread(f["waiting"], 100, 2),
             reporting.spread(f["waiting_cpu"], 100, 2) if "waiting_cpu" in f else "–"]
            for name, f in found.items()]
    return reporting.table(["", "1,000 samples/s", "ours / it", "in processor time",
                            "of a CNN step waiting, %", "in processor time, %"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="0,2", help="loader processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a turn (%(default)s)")
    parser.add_argument("--step-rounds", type=int, default=3,
                        help="turns of each with the CNN (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of the CNN a turn (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few and short turns")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    options.workers = [int(text) for text in options.workers.split(",")]
    if options.quick:
        options.rounds, options.seconds, options.step_rounds, options.steps = 3, 0.15, 2, 2
    machine = reporting.machine()
    found = measure(options)
    # As a run chooses them: no workers for data in memory.
    first = options.workers[0]
    ratio = found[f"PIL a sample, {first} workers"]["ours_over_it"]["median"]
    waiting = found[f"trainer, {first} workers"]["waiting"]["median"]
    if not options.json:
        print(reporting.describe(machine) + f"; n = {options.rounds} turns\n")
        print(show(found))
        print(f"\n{first} workers: {ratio:.1f} × PIL a sample (wanted: {WANTED_RATIO:.0f} or more);"
              f" {100 * waiting:.2f} % of a step waiting (wanted: at most "
              f"{100 * WANTED_SHARE:.0f} %)")
    reporting.print_json("loader", machine=machine, contestants=found, ratio_to_pil=ratio,
                         waiting=waiting)


if __name__ == "__main__":
    reporting.finish(main)
