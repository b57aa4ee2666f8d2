"""How fast are batches made, and does a step wait for them, with this loader and with others?

    python -m benchmarks.loader [--workers 0,2] [--rounds N] [--files] [--lengths]

With --files the data are in files (benchmarks/loader_files.py). With --lengths the small GPT learns
a text in pieces of 5 to 200 bytes, read in a random order and by `--data.sampler like-length`: the
share of the batches that is padding, and samples/s. Otherwise all make batches of 32 images of the
bundled sample, mirrored at random and normalised. An iterator lives through all turns; the batches
that its workers have made during other turns are read first and do not count. Batches are read with
one thread, as in a loader's process; the CNN computes with all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.nn import functional, utils
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

from benchmarks import reporting
from benchmarks.reporting import in_turn, ratios
from examples import bare_loop
from trainer.config.schema import Data, Optim
from trainer.data.loader import Loader, MicroBatchSource
from trainer.data.map_dataset import KeyedSamples
from trainer.data.order import Order, Permutation, make_order
from trainer.data.sampler import BatchPlan, MicroBatchSampler
from trainer.data.workers import DataReader
from trainer.optim import optimizers
from trainer.resilience.progress_marks import ProgressMarks
from trainer.tasks.images import Images
from trainer.tasks.text import Text
from trainer.telemetry.events import Log

MICRO, MICRO_BATCHES, CLIP_NORM = 32, 4, 5.0
CPU = torch.device("cpu")
NAMES = ("trainer", "by hand", "PIL a sample")
AHEAD = 2
"""Batches that each worker makes ahead."""
ENDLESS, STEPS = 10**9, 32


@dataclass
class Contestant:
    """A loader at work: its batches, and what ends it."""

    batches: Iterator[Any]
    close: Callable[[], None]


def ours(workers: int, data: Any, order: Order | None = None) -> Contestant:
    """This trainer's loader, as a run uses it on the CPU."""
    plan = BatchPlan(samples=len(data), global_size=MICRO * MICRO_BATCHES, micro_size=MICRO,
                     drop_last=True)
    sampler = MicroBatchSampler(plan, rank=0, num_ranks=1, order=order or Permutation(len(data), 0),
                                position=0, total_steps=ENDLESS)
    loader = loader_of(DataReader(KeyedSamples(data, seed=0), sampler=sampler, workers=workers,
                                  prefetch=AHEAD, device=CPU), workers)
    return Contestant((micro.batch for window in iter(loader.window, None) for micro in window),
                      loader.close)


def loader_of(source: MicroBatchSource, workers: int) -> Loader:
    return Loader(source, device=CPU, marks=ProgressMarks(), log=Log(level="warning"),
                  at_once=not workers)


def contestant(name: str, workers: int) -> Contestant:
    """This trainer's loader, or a DataLoader over the data set of another contestant."""
    if name == "trainer":
        return ours(workers, Images().dataset("train"))
    data: Any = bare_loop.load_data(0)[0] if name == "by hand" else Pictures()
    loader = DataLoader(
        data, MICRO, sampler=RandomSampler(data, num_samples=ENDLESS), drop_last=True,
        num_workers=workers, prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="fork" if workers else None,
        collate_fn=unchanged if hasattr(data, "__getitems__") else None,
    )  # fmt: skip
    iterator = iter(loader)
    return Contestant(iterator, getattr(iterator, "_shutdown_workers", lambda: None))


def unchanged(batch: Any) -> Any:
    """Collate what is already a batch."""
    return batch


class Pictures(Dataset[Any]):
    """Single images of the sample as PIL images, by torchvision.transforms."""

    def __init__(self) -> None:
        self.images, self.labels, *_ = bare_loop.read_sample()
        scale = [float(self.images.mean() / 255)], [float(self.images.std() / 255)]
        self.transform = transforms.Compose([
            transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize(*scale)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), int(self.labels[index])


def reader(contestant: Contestant, workers: int, seconds: float) -> Callable[[], float]:
    """Measures samples per second."""

    def read() -> float:
        for _ in range(2 * AHEAD * workers + 2):
            next(contestant.batches)
        count, began = 0, time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            next(contestant.batches)
            count += 1
        return count * MICRO / (now - began)

    return read


def waiting(model: Any, batches: Iterator[Any], steps: int) -> Callable[[], float]:
    """Measures the share of `steps` steps spent waiting for batches, after one that does not
    count."""
    optimizer = optimizers.make_optimizer(Optim(), model.to(memory_format=torch.channels_last))

    def step() -> tuple[float, float]:
        waited, began = 0.0, time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(MICRO_BATCHES):
            asked = time.perf_counter()
            images, labels = next(batches)
            waited += time.perf_counter() - asked
            (functional.cross_entropy(model(images), labels) / MICRO_BATCHES).backward()
        utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return waited, time.perf_counter() - began

    def share() -> float:
        step()
        waits, wholes = zip(*(step() for _ in range(steps)), strict=True)
        return sum(waits) / sum(wholes)

    return share


def with_one_thread(contestants: Mapping[str, Callable[[], Any]], rounds: int
                    ) -> dict[str, list[Any]]:
    """As `in_turn`; torch computes with one thread, as in a loader's process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = in_turn(contestants, rounds)
    torch.set_num_threads(threads)
    return found


def measure(names: tuple[str, ...], make: Callable[[str, int], Contestant], workers: list[int],
            rounds: int, seconds: float, *, model: Any = None, step_rounds: int, steps: int
            ) -> dict[str, dict[str, Any]]:
    """Figures of each contestant with each number of workers: samples per second, compared with the
    first contestant, and with a `model` the share of `steps` training steps spent waiting."""
    entrants = {f"{name}, {count} workers": (count, make(name, count))
                for count in workers for name in names}
    rates = with_one_thread({key: reader(entrant, count, seconds)
                             for key, (count, entrant) in entrants.items()}, rounds)
    shares: dict[str, list[float]] = {}
    if model is not None:
        shares = in_turn({key: waiting(model, entrant.batches, steps)
                          for key, (_, entrant) in entrants.items()}, step_rounds)
    for _, entrant in entrants.values():
        entrant.close()
    return {key: {
        "samples_per_s": reporting.summary(rates[key]),
        "first_over_it": reporting.summary(ratios(rates[f"{names[0]}, {count} workers"],
                                                  rates[key])),
        "waiting": reporting.summary(shares[key]) if shares else None,
    } for key, (count, _) in entrants.items()}  # fmt: skip


def measure_lengths(rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Samples per second of training steps, and the padded share, in two orders."""
    task = Text(context=200, shortest=5)
    data: Any = task.dataset("train")
    entrants = {name: ours(0, data, make_order(Data(sampler=sampler), data, 0, micro_size=MICRO))
                for name, sampler in (("in a random order", None), ("like-length", "like-length"))}
    padded: dict[str, list[float]] = {name: [0, 0] for name in entrants}

    def turn(name: str, batches: Iterator[Any]) -> Callable[[], float]:
        torch.manual_seed(0)
        model = task.model()
        optimizer = optimizers.make_optimizer(Optim(), model)

        def train() -> float:
            began = time.perf_counter()
            for _ in range(steps):
                inputs, targets = next(batches)
                padded[name][0] += int((targets < 0).sum())
                padded[name][1] += targets.numel()
                optimizer.zero_grad(set_to_none=True)
                functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
                optimizer.step()
            return steps * MICRO / (time.perf_counter() - began)

        return train

    rates = with_one_thread({name: turn(name, one.batches) for name, one in entrants.items()},
                            rounds)
    for one in entrants.values():
        one.close()
    first = rates["in a random order"]
    return {name: {"padded": part / whole, "samples_per_s": reporting.summary(rates[name]),
                   "over_random": reporting.interval(ratios(rates[name], first))}
            for name, (part, whole) in padded.items()}


def show_lengths(found: dict[str, dict[str, Any]]) -> str:
    return reporting.table(["", "padded, %", "samples/s", "over random"], [
        [name, f"{100 * f['padded']:.1f}", reporting.spread(f["samples_per_s"]),
         reporting.within(f["over_random"], ".2f")] for name, f in found.items()])


def show(found: dict[str, dict[str, Any]], step: str = "a CNN step") -> str:
    return reporting.table(["", "samples/s", "first / it", f"of {step} waiting, %"], [
        [name, reporting.spread(f["samples_per_s"], 1, 0),
         reporting.spread(f["first_over_it"], 1, 2),
         reporting.spread(f["waiting"], 100, 2) if f["waiting"] else "–"]
        for name, f in found.items()])


def main() -> None:
    parser = reporting.parser("loader", __doc__)
    parser.add_argument("--workers", type=reporting.numbers, default="0,2",
                        help="loader processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--lengths", action="store_true",
                        help="pieces of different lengths, sorted and unsorted")
    parser.add_argument("--files", action="store_true", help="JPEG files, tars and Parquet")
    options = parser.parse_args()
    machine = reporting.machine()
    if options.lengths:
        found = measure_lengths(options.rounds, STEPS)
        print(f"n = {options.rounds} turns of {STEPS} batches\n{show_lengths(found)}")
        reporting.print_json("loader-lengths", machine=machine, contestants=found)
        return
    workers = [int(number) for number in options.workers]
    if options.files:
        from benchmarks import loader_files

        loader_files.report(machine, workers, options.rounds, seconds=1.0)
        return
    torch.manual_seed(0)
    found = measure(NAMES, contestant, workers, options.rounds, 0.25, model=Images().model(),
                    step_rounds=min(3, options.rounds), steps=3)
    print(f"n = {options.rounds} turns\n{show(found)}")
    reporting.print_json("loader", machine=machine, contestants=found)


if __name__ == "__main__":
    reporting.finish(main)
