"""Exact evaluation: sharded without padding, with the same result for any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.config.schema import Config
from trainer.data import batch as batches
from trainer.data.batch import to_device
from trainer.data.map_dataset import KeyedSamples, MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.data.stream_reader import StreamBatches
from trainer.data.workers import DataReader
from trainer.distributed.partition import block
from trainer.distributed.world import World
from trainer.errors import ConfigError, listed
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.prepare import loader_workers
from trainer.task import Outcome, check_outcome, task_figures
from trainer.telemetry.classification import Figure
from trainer.telemetry.status import Phase

REMEDY = ("correct it, or exclude it in dataset(): --data.on-error skip is for training samples "
          "only, since scores over other samples are not comparable")
"""Advice for a bad sample."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Means over a data set."""

    loss: float
    metrics: dict[str, float]
    """Metrics of the task, and values of its `figures()`."""
    samples: int
    table: Tensor | None = None
    """Sum of the tables, float64; None if the task returns none."""


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates a data set, in numbered batches with fixed content that the ranks share."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Outcome]
    dataset: Any
    collate: Callable[[list[Any]], Any]
    batch_size: int
    workers: int
    seed: int
    rank: int
    num_ranks: int
    device: torch.device
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    all_sum: Callable[[Tensor], Tensor]
    """Sums a tensor over the ranks, in place."""
    marks: ProgressMarks
    step: Callable[[], int]
    epoch: Callable[[], int] = lambda: 0
    weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Context in which the model holds the weights to evaluate."""
    stopped: Callable[[], bool] = lambda: False
    """Whether this rank is asked to stop; called before each batch."""
    warn_once: Callable[[str], None] = lambda text: None
    has_warned: bool = False
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Name → function of the means and the table."""

    def __call__(self) -> Scores | None:
        """Collective. Evaluate the whole data set in eval mode; nothing of the training changes.
        Returns None, on all ranks, if some rank was asked to stop."""
        training = self.model.training
        self.model.eval()
        try:
            with rng.preserved(), self.weights():
                sums = self._sums()
        finally:
            self.model.train(training)
        # Compare a hash of the names: it is equal on all ranks if the mean of the squares is the
        # square of the mean.
        name_hash = float(zlib.crc32(repr(sums and sums[0]).encode()) >> 16)
        stopped, total, squares = self.all_sum(torch.tensor(
            [float(sums is None), name_hash, name_hash * name_hash], dtype=torch.float64)).tolist()
        if stopped or sums is None:
            return None
        names, rows, table = sums
        if squares * self.num_ranks != total * total:
            raise ConfigError(f"the task's loss returns the metrics {names[1:]} on rank {self.rank}"
                              " and others on other ranks; return the same for each batch, (0, 0) "
                              "for a batch with nothing to count.")
        # Each row belongs to one rank and the others add zeros: the same bits for any split. The
        # table holds integers, whose sum is exact in any order.
        shared = rows if table is None else torch.cat([rows.flatten(), table.flatten()])
        self.all_sum(shared)
        if table is not None:
            table = shared[rows.numel():].reshape(table.shape)
            rows = shared[:rows.numel()].reshape(rows.shape)
        means = {n: s / c if c else float("nan")
                 for n, (s, c) in zip(names, _pairs(rows), strict=False)}
        means |= {name: _number(name, figure(means, table))
                  for name, figure in self.figures.items()}
        return Scores(loss=means.pop("loss"), metrics=means, table=table,
                      samples=round(float(rows[:, -1].sum())))

    def _sums(self) -> tuple[list[str], Tensor, Tensor | None] | None:
        """Evaluate this rank's batches. Returns names of the means; a row for each batch of all
        ranks, with (sum, count) of each, and the number of samples; the sum of the tables. None if
        this rank was asked to stop."""
        stream, count = isinstance(self.dataset, IterableDataset), self._count()
        if not count and not stream:
            raise ValueError("the data set to evaluate is empty")
        mine: Sequence[int] = block(count, self.rank, self.num_ranks)
        rows: dict[int, list[float]] = {}
        names: list[str] = []
        table: Tensor | None = None
        buffers, moved = Buffers(self.model), set[str]()
        own = rng.find_generators(*self.model.modules(), self.loss)
        # A rank without a batch evaluates the first one, to know the shape of the table.
        for micro in self.batches(mine or range(1)):
            if self.stopped():
                return None
            number = micro.spec.number
            self.marks.mark(Phase.EVALUATE, self.step(), self.epoch())
            rng.seed_all(self.seed, rng.EVALUATE, number)
            rng.key(own, self.seed, rng.EVALUATE, number)
            # Buffers must not carry over: a restart evaluates again, and another number of ranks
            # evaluates in another order.
            with buffers.preserved(moved), torch.no_grad(), self.autocast():
                outcome = self.loss(self.model, to_device(micro.batch, self.device))
            total, metrics = check_outcome(outcome)
            if names and names != ["loss", *metrics]:
                raise ConfigError(f"the task's loss returned the metrics {names[1:]} for a batch of"
                                  f" the evaluation and {[*metrics]} for another; return the same "
                                  "for each batch, (0, 0) for a batch with nothing to count.")
            names = ["loss", *metrics]
            pairs = [(total, outcome.count), *metrics.values()]
            row = [v.item() if isinstance(v, Tensor) else float(v) for pair in pairs for v in pair]
            rows[number] = [*row, float(micro.samples)]
            if outcome.table is not None:
                counts = outcome.table.cpu().double()  # mps has no float64
                table = torch.zeros_like(counts) if table is None else table
                table += counts * (stream or number in mine)
        if moved and not self.has_warned:
            self.has_warned = True
            self.warn_once("the model's forward changes its buffers "
                          f"{listed(sorted(moved))} in eval mode too; they are restored "
                          "after each batch, since an evaluation must not change the model: guard "
                          "the change with `if self.training`")
        if stream:  # all ranks have read to the end of the stream, and have its empty last batch
            if not rows:
                raise ValueError("the stream to evaluate is empty")
            count, mine = max(rows), [number for number in rows if number < max(rows)]
        width = 2 * len(names) + 1
        every = torch.zeros(count, width, dtype=torch.float64)
        for number in mine:
            every[number] = torch.tensor(rows[number], dtype=torch.float64)
        return names, every, table

    def _count(self) -> int:
        """Number of batches; 0 for a stream."""
        stream = isinstance(self.dataset, IterableDataset)
        return 0 if stream else -(-len(self.dataset) // self.batch_size)

    def every_batch(self) -> Iterator[MicroBatch]:
        """Yield all batches of the data set, in order."""
        return self.batches(range(self._count()))

    def batches(self, numbers: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield the batches with these numbers; for a stream, this rank's share."""
        if isinstance(self.dataset, IterableDataset):
            share = StreamBatches(self.dataset, batch_size=self.batch_size, seed=self.seed,
                                  collate=self.collate, rank=self.rank, num_ranks=self.num_ranks)
            # At most one worker: each would read the whole stream.
            yield from DataReader(share, workers=min(1, self.workers), prefetch=2,
                                  device=self.device)
            return
        indices, size = range(len(self.dataset)), self.batch_size
        slots = [MicroBatchSpec(0, 0, n, True, tuple(indices[n * size:(n + 1) * size]))
                 for n in numbers]
        samples = KeyedSamples(self.dataset, seed=self.seed, collate=self.collate, augment=False,
                               rank=self.rank, advice=REMEDY)
        yield from DataReader(samples, sampler=slots, workers=self.workers, prefetch=2,
                              device=self.device)


def make_evaluator(
    task: Any, dataset: Any, model: nn.Module, config: Config[Any], world: World, **run: Any
) -> Evaluator:
    """The evaluator of one of the task's data sets; `run` are its further arguments."""
    size = config.eval.batch_size
    return Evaluator(
        model=model, loss=task.loss, dataset=dataset,
        collate=getattr(task, "collate", batches.collate), figures=task_figures(task),
        batch_size=2 * config.batch.micro_size if size == "auto" else size,
        workers=loader_workers(config, dataset, world), seed=config.seed, rank=world.rank,
        num_ranks=world.size, device=world.device, all_sum=world.all_sum, **run)


def _pairs(table: Tensor) -> list[tuple[float, float]]:
    """Add each column in the order of rows (Python's `sum` would round otherwise), and pair the
    sums as (sum, count)."""
    sums = [functools.reduce(operator.add, column, 0.0) for column in table.T.tolist()[:-1]]
    return list(zip(sums[::2], sums[1::2], strict=True))


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise ConfigError(f"--task: {name!r} of figures() returned {value!r}; return a number (NaN "
                          "for an undefined value).")
    return float(value)
