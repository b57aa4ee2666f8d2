"""64 ranks make the same collectives in the same order. torch's "fake" process group has any number
of ranks in one process, and no data."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from plain_step import plain_step
from states import make_state
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer import Outcome
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import BatchPlan, MicroBatchSpec
from trainer.distributed import sync_batchnorm
from trainer.distributed.ddp import Objective, wrap
from trainer.distributed.partition import block, micro_batches_per_rank
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.world import World

RANKS, MICRO_BATCHES = 64, 80  # some ranks have two micro-batches, the others one and a stand-in
Call = tuple[Any, ...]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs or {}))
            peers = [n for n in leaves if type(n) is int] if func._schema.name in (
                "c10d::send", "c10d::recv_") else []
            tensors = [(t.dtype, tuple(t.shape)) for t in leaves if isinstance(t, Tensor)]
            self.calls.append((func._schema.name, *peers[:1], *tensors))
        return func(*args, **kwargs or {})


def loss(model: nn.Module, batch: Tensor) -> Outcome:
    return Outcome(model(batch).square().sum(), len(batch))


def reduce_bucket(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does itself, which needs the result of a fake collective."""
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


def calls_of(rank: int, canonical: bool) -> list[Call]:
    """The collectives of a rank in a step."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS)
    try:
        model: nn.Module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        if not canonical:
            sync_batchnorm.convert(model, RANKS, "cpu")
        group = dist.group.WORLD
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = make_state(model, optimizer, num_ranks=1 if canonical else RANKS)
        device = torch.device("cpu")
        objective = Objective(model, loss, num_ranks=state.num_ranks, nominal_count=320.0,
                              device=device)
        step = plain_step(state, objective, objective if canonical else wrap(
            objective, group=group, device=device, bucket_mb=25.0))
        if isinstance(step.compute.wrapped, DistributedDataParallel):
            step.compute.wrapped.register_comm_hook(
                None, lambda _, bucket: reduce_bucket(bucket))
        else:
            world = SimpleNamespace(rank=rank, size=RANKS, group=group, broadcast=lambda _: None)
            plan = BatchPlan(samples=640, global_size=320, micro_size=4, drop_last=True)
            step.compute.reduction = RankInvariantReduction(
                objective, step.compute.parameters, step.boundary.buffers, cast(World, world), plan,
                optional=False)
        numbers = [*block(MICRO_BATCHES, rank, RANKS)]
        numbers += [-1] * (micro_batches_per_rank(MICRO_BATCHES, RANKS) - len(numbers))
        window = [MicroBatch(MicroBatchSpec(1, 0, n, i == len(numbers) - 1, (0, 1, 2, 3)[:4 * (
            n >= 0)]), torch.randn(4, 3)) for i, n in enumerate(numbers)]
        for _ in range(1 if canonical else 3):  # DDP makes its buckets anew in the second step
            with Recorder() as recorder:
                for micro in step.compute.reduction(window):
                    step.forward_backward(micro)
            objective.forget()
        return recorder.calls
    finally:
        dist.destroy_process_group()


def test_every_rank_makes_the_same_collectives_in_the_same_order(
        monkeypatch: pytest.MonkeyPatch) -> None:
    gather = sync_batchnorm._gather_rows  # the fake group fills nothing
    monkeypatch.setattr(sync_batchnorm, "_gather_rows",
                        lambda row, module: gather(row, module).fill_(2.0))
    first, *others = [calls_of(rank, canonical=False) for rank in (0, 1, 3, 31, 63)]

    # Of the batch norm in each micro-batch, forward and backward; then gradients with the sums.
    names = [name for name, *_ in first]
    assert names == ["c10d::allgather_"] * 4 + ["c10d::allreduce_"]
    assert all(other == first for other in others)


def test_canonical_reduction_pairs_each_send_with_a_receive_of_its_size() -> None:
    sent, received = defaultdict[Any, list[Any]](list), defaultdict[Any, list[Any]](list)
    some = (0, 1, 15, 16, 62, 63)  # with one and two micro-batches, at the ends of subtrees
    for rank in some:
        for name, peer, *tensors in calls_of(rank, canonical=True):
            assert name in ("c10d::send", "c10d::recv_")
            if peer in some and name == "c10d::send":
                sent[rank, peer] += tensors
            elif peer in some:
                received[peer, rank] += tensors

    assert len(sent) == len(some) * (len(some) - 1)
    assert sent == received
