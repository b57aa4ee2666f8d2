"""Exact evaluation: sharded without padding, with the same result for any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from trainer.task import check_outcome, task_figures
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

    task: Any
    dataset: Any
    model: nn.Module
    config: Config[Any]
    world: World
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    marks: ProgressMarks
    step: Callable[[], int]
    epoch: Callable[[], int] = lambda: 0
    weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """Context in which the model holds the weights to evaluate."""
    stopped: Callable[[], bool] = lambda: False
    """Whether this rank is asked to stop; called before each batch."""
    warn_once: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        size = self.config.eval.batch_size
        self._batch_size = 2 * self.config.batch.micro_size if size == "auto" else size
        self._is_stream = isinstance(self.dataset, IterableDataset)
        self._count = 0 if self._is_stream else -(-len(self.dataset) // self._batch_size)
        self._workers = loader_workers(self.config, self.dataset, self.world)
        self._collate = getattr(self.task, "collate", batches.collate)
        self._figures = task_figures(self.task)
        self._has_warned = False

    def __call__(self) -> Scores | None:
        """Collective. Evaluate the whole data set in eval mode; nothing of the training changes.
        Returns None, on all ranks, if some rank was asked to stop."""
        with eval_mode(self.model), self.weights():
            sums = self._sums()
        everywhere = self.world.gather_json(None if sums is None else sums[0])
        if sums is None or None in everywhere:
            return None
        names, rows, table = sums
        if any(other != names for other in everywhere):
            raise ConfigError(f"the task's loss returns the metrics {names[1:]} on rank "
                              f"{self.world.rank} and others on other ranks; return the same for "
                              "each batch, (0, 0) for a batch with nothing to count.")
        # Each row belongs to one rank and the others add zeros: the same bits for any split. The
        # table holds integers, whose sum is exact in any order.
        self.world.all_sum(rows)
        if table is not None:
            self.world.all_sum(table)
        means = {n: s / c if c else float("nan")
                 for n, (s, c) in zip(names, _pairs(rows), strict=False)}
        means |= {name: _number(name, figure(means, table))
                  for name, figure in self._figures.items()}
        return Scores(loss=means.pop("loss"), metrics=means, table=table,
                      samples=round(float(rows[:, -1].sum())))

    def _sums(self) -> tuple[list[str], Tensor, Tensor | None] | None:
        """Evaluate this rank's batches. Returns names of the means; a row for each batch of all
        ranks, with (sum, count) of each, and the number of samples; the sum of the tables. None if
        this rank was asked to stop."""
        mine: Sequence[int] = block(self._count, self.world.rank, self.world.size)
        rows: dict[int, list[float]] = {}
        names: list[str] = []
        table: Tensor | None = None
        buffers, moved = Buffers(self.model), set[str]()
        loss, seed = self.task.loss, self.config.seed
        own = rng.find_generators(*self.model.modules(), loss)
        # A rank without a batch evaluates the first one, to know the shape of the table.
        for micro in self.batches(mine or range(1)):
            if self.stopped():
                return None
            number = micro.spec.number
            self.marks.mark(Phase.EVALUATE, self.step(), self.epoch())
            rng.seed_all(seed, rng.EVALUATE, number)
            rng.key(own, seed, rng.EVALUATE, number)
            # Buffers must not carry over: a restart evaluates again, and another number of ranks
            # evaluates in another order.
            with buffers.preserved(moved), torch.no_grad(), self.autocast():
                outcome = loss(self.model, to_device(micro.batch, self.world.device))
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
                table += counts * (self._is_stream or number in mine)
        if moved and not self._has_warned:
            self._has_warned = True
            self.warn_once(f"the model's forward changes its buffers {listed(sorted(moved))} in "
                           "eval mode too; they are restored after each batch, since an evaluation "
                           "must not change the model: guard the change with `if self.training`")
        count = self._count
        if self._is_stream:  # each rank has read to the end, and has its empty last batch
            if not rows:
                raise ValueError("the stream to evaluate is empty")
            count, mine = max(rows), [number for number in rows if number < max(rows)]
        every = torch.zeros(count, 2 * len(names) + 1, dtype=torch.float64)
        for number in mine:
            every[number] = torch.tensor(rows[number], dtype=torch.float64)
        return names, every, table

    def every_batch(self) -> Iterator[MicroBatch]:
        """Yield all batches of the data set, in order."""
        return self.batches(range(self._count))

    def batches(self, numbers: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield the batches with these numbers; for a stream, this rank's share."""
        seed, rank, device = self.config.seed, self.world.rank, self.world.device
        if self._is_stream:
            share = StreamBatches(self.dataset, batch_size=self._batch_size, seed=seed,
                                  collate=self._collate, rank=rank, num_ranks=self.world.size)
            # At most one worker: each would read the whole stream.
            yield from DataReader(share, workers=min(1, self._workers), prefetch=2, device=device)
            return
        indices, size = range(len(self.dataset)), self._batch_size
        specs = [MicroBatchSpec(0, 0, n, True, tuple(indices[n * size:(n + 1) * size]))
                 for n in numbers]
        samples = KeyedSamples(self.dataset, seed=seed, collate=self._collate, augment=False,
                               rank=rank, advice=REMEDY)
        yield from DataReader(samples, sampler=specs, workers=self._workers, prefetch=2,
                              device=device)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in evaluation mode; restores the model's mode and the random generators."""
    training = model.training
    model.eval()
    try:
        with rng.preserved():
            yield
    finally:
        model.train(training)


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
