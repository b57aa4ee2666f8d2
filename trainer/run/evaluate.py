"""Exact evaluation: each sample counts once, with the same result for any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

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
from trainer.distributed import torch_private
from trainer.distributed.ddp import stack
from trainer.distributed.partition import block, micro_batches_per_rank
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import World
from trainer.errors import ConfigError, listed
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.metric_states import MetricStates
from trainer.run.model_modes import eval_mode
from trainer.run.prepare import EVALUATION_REMEDY, loader_workers
from trainer.task import Outcome, check_outcome, method_of, task_figures
from trainer.telemetry.status import Phase


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
class _Sums:
    """Sums over the batches of a rank, which stay on the device: nobody waits for a batch."""

    device: torch.device
    names: list[list[str]] = field(default_factory=list)
    """Names of the metrics: one list, unless batches have different ones."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    """Batch → sum and count of the loss and each metric, and the number of samples."""
    table: Tensor | None = None

    def add(self, micro: MicroBatch, outcome: Outcome) -> None:
        """Add a batch; a stand-in only gives names, and the shape of the table."""
        total, metrics = check_outcome(outcome)
        if [*metrics] not in self.names:
            self.names.append([*metrics])
        on_mps = self.device.type == "mps"  # which has no float64
        if micro.samples:
            pairs = [(total, outcome.count), *metrics.values(), (micro.samples,)]
            self.rows[micro.spec.number] = stack(
                [*chain.from_iterable(pairs)], self.device,
                torch.float32 if on_mps else torch.float64)
        if outcome.table is not None:
            table = (outcome.table.cpu() if on_mps else outcome.table).double()
            self.table = torch.zeros_like(table) if self.table is None else self.table
            self.table += table if micro.samples else 0

    def read(self, width: int, count: int) -> tuple[Tensor, Tensor | None]:
        """The rows of all batches (count, width), zeros for those of other ranks, and the table, on
        the host, which waits for the device."""
        rows = torch.zeros(count, width, dtype=torch.float64)
        with waiting_for(WaitsFor.DEVICE):
            if self.rows:
                rows[list(self.rows)] = torch.stack(list(self.rows.values())).cpu().double()
            return rows, None if self.table is None else self.table.cpu()


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
    limit: int = 0
    """Number of batches to evaluate, evenly spaced, or the first of a stream; 0: all."""

    def __post_init__(self) -> None:
        size = self.config.eval.batch_size
        self._batch_size = 2 * self.config.batch.micro_size if size == "auto" else size
        self._is_stream = isinstance(self.dataset, IterableDataset)
        self._count = 0 if self._is_stream else -(-len(self.dataset) // self._batch_size)
        self._workers = loader_workers(self.config, self.dataset, self.world)
        self._collate = method_of(self.task, "collate") or batches.collate
        self.figures = task_figures(self.task)
        self.states = MetricStates(self.task, self.world.device)
        self._has_warned = False

    def __call__(self) -> Scores | None:
        """Collective. Evaluate the whole data set in eval mode; nothing of the training changes.
        Returns None, on all ranks, if some rank was asked to stop."""
        with eval_mode(self.model), self.weights():
            sums = self._sums()
        everywhere = self.world.gather_json(
            None if sums is None else [max(sums.rows, default=-1) + 1, sums.names])
        if sums is None or None in everywhere:
            return None
        if not (count := max(end for end, _ in everywhere)):
            raise ValueError("the stream to evaluate is empty")
        names, *others = [n for _, found in everywhere for n in found]
        if others := [other for other in others if other != names]:
            raise ConfigError(f"the task's loss returned the metrics {names} for a batch of the "
                              f"evaluation and {others[0]} for another; return the same for each "
                              "batch, (0, 0) for a batch with nothing to count.")
        # Each row belongs to one rank and the others add zeros: the same bits for any split. The
        # table holds integers, whose sum is exact in any order.
        rows, table = sums.read(2 * len(names) + 3, count)
        self.world.all_sum(rows)
        if table is not None:
            self.world.all_sum(table)
        means = {n: s / c if c else float("nan")
                 for n, (s, c) in zip(["loss", *names], _pairs(rows), strict=True)}
        if twice := means.keys() & (found := self.states.compute(self.world)).keys():
            raise ConfigError(f"--task: {min(twice)!r} is both in metrics() and a metric of the "
                              "loss; choose another name for one of them.")
        means |= found
        means |= {n: float(figure(means, table)) for n, figure in self.figures.items()}
        return Scores(loss=means.pop("loss"), metrics=means, table=table,
                      samples=round(float(rows[:, -1].sum())))

    def first_names(self) -> list[str]:
        """Collective. Names of the metrics of the loss for the first batch."""
        first = replace(self, limit=1, marks=ProgressMarks(), stopped=lambda: False)
        with eval_mode(self.model), torch_private.uncompiled(self.model), self.weights():
            sums = first._sums()
        everywhere = self.world.gather_json(sums.names if sums else [])
        return next((names for found in everywhere for names in found), [])

    def _sums(self) -> _Sums | None:
        """Evaluate this rank's batches; None if it was asked to stop."""
        count = min(self._count, self.limit or self._count)
        # Of all data, the number of a batch is its place.
        mine = [place * self._count // count
                for place in block(count, self.world.rank, self.world.size)]
        # Each rank computes equally many, for collectives of the task: -1 is a stand-in.
        mine += [-1] * (micro_batches_per_rank(count, self.world.size) - len(mine))
        self.states.begin()
        sums, buffers = _Sums(device=self.world.device), Buffers(self.model)
        loss, seed = self.task.loss, self.config.seed
        own = rng.find_generators(*self.model.modules(), loss)
        for micro in self.batches(mine, self.limit):
            if self.stopped():
                return None
            number = micro.spec.number
            self.marks.mark(Phase.EVALUATE, self.step(), self.epoch())
            rng.seed_all(seed, rng.EVALUATE, number)
            rng.key(own, seed, rng.EVALUATE, number)
            # Buffers must not carry over: a restart evaluates again, and another number of ranks
            # evaluates in another order.
            with buffers.preserved(), torch.no_grad(), self.autocast():
                outcome = loss(self.model, to_device(micro.batch, self.world.device))
                self.states.add(number if micro.samples else -1, outcome.predictions)
            sums.add(micro, outcome)
        if not self._has_warned and (moved := buffers.moved()):
            self._has_warned = True
            self.warn_once(f"the model's forward changes its buffers {listed(moved)} in "
                           "eval mode too; they are restored after each batch, since an evaluation "
                           "must not change the model: guard the change with `if self.training`")
        return sums

    def every_batch(self) -> Iterator[MicroBatch]:
        """Yield all batches of the data set, in order."""
        return self.batches(range(self._count))

    def batches(self, numbers: Sequence[int], limit: int = 0) -> Iterator[MicroBatch]:
        """Yield the batches with these numbers (-1: a stand-in); for a stream, this rank's share of
        the first `limit` ones (0: all)."""
        seed, rank, device = self.config.seed, self.world.rank, self.world.device
        if self._is_stream:
            share = StreamBatches(self.dataset, batch_size=self._batch_size, seed=seed,
                                  collate=self._collate, rank=rank, num_ranks=self.world.size,
                                  limit=limit)
            # At most one worker: each would read the whole stream.
            yield from DataReader(share, workers=min(1, self._workers), prefetch=2, device=device)
            return
        indices, size = range(len(self.dataset)), self._batch_size
        specs = [MicroBatchSpec(0, 0, n, True, tuple(indices[n * size:(n + 1) * size]))
                 if n >= 0 else MicroBatchSpec(0, 0, n, True, (), stand_in=tuple(indices[:size]))
                 for n in numbers]
        samples = KeyedSamples(self.dataset, seed=seed, collate=self._collate, augment=False,
                               rank=rank, advice=EVALUATION_REMEDY)
        yield from DataReader(samples, sampler=specs, workers=self._workers, prefetch=2,
                              device=device)


def _pairs(table: Tensor) -> list[tuple[float, float]]:
    """Add each column in the order of rows (Python's `sum` would round otherwise), and pair the
    sums as (sum, count)."""
    sums = [functools.reduce(operator.add, column, 0.0) for column in table.T.tolist()[:-1]]
    return list(zip(sums[::2], sums[1::2], strict=True))
