"""On a GPU the host waits once in a step, to read the sums. Shown on fake CUDA tensors, which have
no values: see tests/support/host_waits.py."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_waits import emulated, waits_in
from plain_step import plain_step
from states import make_state
from torch import Tensor, nn

from trainer import Outcome
from trainer.config.schema import Batch, Clip, Config
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import BatchPlan, MicroBatchSpec
from trainer.distributed import stand_in, sync_batchnorm
from trainer.distributed.ddp import REQUESTED, Objective
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.torch_private import tree_map
from trainer.distributed.world import LaunchInfo, World
from trainer.optim.ema import Ema
from trainer.optim.nan_detection import nan_detector
from trainer.resilience.progress_marks import ProgressMarks
from trainer.run.evaluate import Evaluator
from trainer.run.metric_states import MetricStates
from trainer.step import Step
from trainer.tasks import losses
from trainer.tasks.images import Images
from trainer.tasks.shapes import Shapes
from trainer.tasks.spiral import Spiral
from trainer.tasks.text import Text
from trainer.telemetry.classification import confusion

CUDA = torch.device("cuda", 0)
SUMS = "trainer/distributed/ddp.py:read_sums"


class Counting(nn.Module):
    """A buffer that is assigned, and one that changes in place, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return x


def net() -> nn.Module:
    with CUDA:
        return nn.Sequential(nn.Linear(8, 16), Counting(), nn.BatchNorm1d(16), nn.ReLU(),
                             nn.Linear(16, 3))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
    """Metrics on the device and the host, of any shape with one element."""
    x, y = batch
    logits = model(x)
    total = nn.functional.cross_entropy(logits, y, reduction="sum")
    hits = (logits.argmax(1) == y).sum()
    return Outcome({"class": total, "size": logits.square().sum()}, torch.tensor(len(x)),
                   {"hits": (hits, len(x)), "rows": (hits.reshape(1), torch.tensor([len(x)]))})


def micro_batches(stand_in: bool = True, first: int = 0) -> list[MicroBatch]:
    """Two with samples, and a stand-in."""
    numbers = (first, first + 1, -1)[: 2 + stand_in]
    batch = torch.empty(4, 8, device=CUDA), torch.empty(4, dtype=torch.int64, device=CUDA)
    return [MicroBatch(MicroBatchSpec(1, 0, n, n == numbers[-1], (0, 1, 2, 3) * (n >= 0)), batch)
            for n in numbers]


def applied(size: int) -> list[float]:
    """What the host reads of the sums of a step: nothing is requested."""
    values = [1.0] * size
    values[REQUESTED] = [0.0] * len(values[REQUESTED])
    return values


def make_step(optimizer: Callable[..., Any] = torch.optim.AdamW, ranks: int = 1,
              clip: Clip | None = None, fp16: bool = False, canonical: int = 0,
              optional: bool = False, anomaly: bool = False, **options: Any) -> Step:
    model = net()
    made = optimizer(model.parameters(), lr=0.1, **options)
    state = make_state(model, made, scaler=torch.amp.GradScaler("cuda", enabled=fp16),
                       num_ranks=ranks, ema=Ema(model, 0.9))
    objective = Objective(model, loss, num_ranks=ranks, nominal_count=8.0, device=CUDA)
    step = plain_step(state, objective, objective, clip)
    buffers = step.boundary.buffers
    objective._changed, objective._nonfinite = buffers.changed, buffers.nonfinite
    if anomaly:
        step.nan_detector = lambda spec: nan_detector(objective, model, lambda origin: None)
    if canonical:
        world: Any = SimpleNamespace(  # the second rank, of several
            rank=int(canonical > 1), size=canonical, group=canonical > 1 or None,
            broadcast=lambda _: None)
        plan = BatchPlan(samples=64, global_size=8 * canonical, micro_size=4, drop_last=True)
        step.compute.reduction = RankInvariantReduction(
            objective, step.compute.parameters, buffers, world, plan, optional=optional)
    return step


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one rank": ({}, []),
    "several ranks": ({"ranks": 2}, []),
    "fused": ({"fused": True}, []),
    "SGD": ({"optimizer": torch.optim.SGD, "momentum": 0.9}, []),
    "clipped by value": ({"clip": Clip(value=1.0, norm=None)}, []),
    "fp16": ({"fp16": True}, []),
    "fp16 on several ranks, fused": ({"fp16": True, "ranks": 2, "fused": True}, []),
    "canonical": ({"canonical": 1}, []),
    "canonical on several ranks": ({"canonical": 4}, []),
    "canonical with --parallel.find-unused": (
        {"canonical": 1, "optional": True},
        # The host decides which parameters the optimizer updates.
        ["trainer/distributed/rank_invariant_reduction.py:_finish"]),
    "--numerics.anomaly on": (
        # The first operation that made a NaN is looked for once per micro-batch with samples.
        {"anomaly": True}, ["trainer/optim/nan_detection.py:finish"] * 2),
}
"""Options of a step; places of waits besides the one that reads the sums, each with its reason."""


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once_in_a_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda calls: [])
    options, others = CASES[case]
    ranks = options.get("canonical", 0)
    with waits_in(applied) as waits:
        step = make_step(**options)
        batch = micro_batches(stand_in=not ranks, first=2 * (ranks > 1))
        step(batch)  # allocates what later steps use
        waits.found.clear()
        result = step(batch)

    assert result is not None
    assert not result.skipped
    print(f"step, {case}: {len(waits.found)} host waits")
    assert waits.places() == [*others, SUMS], waits.found
    assert not waits.unmarked()
    assert not waits.unordered


@pytest.fixture
def group() -> Iterator[None]:
    """Four ranks, of which there is only this one."""
    dist.init_process_group("fake", rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronised_batch_norm_never_waits(group: None, momentum: float | None) -> None:
    with emulated("Meta"), waits_in() as waits:
        layer = nn.BatchNorm2d(5, momentum=momentum, device=CUDA)
        sync_batchnorm.convert(layer, 4, "cuda")
        waits.found.clear()
        for rows in (3, 0):
            x = torch.empty(rows, 5, 2, 2, device=CUDA, requires_grad=True)
            output = layer(x)
            gradients = output.grad_fn.apply(torch.empty_like(output))
            assert [g.shape for g in gradients[:3]] == [x.shape, (5,), (5,)]
        with stand_in.forward_and_backward(layer):
            layer(torch.empty(3, 5, 2, 2, device=CUDA))

    print(f"SyncBatchNorm: {len(waits.found)} host waits")
    assert not waits.found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_normalisation_on_a_gpu_equals_that_on_a_cpu(dtype, affine, monkeypatch) -> None:
    """With kernels that follow the definitions of those of CUDA."""
    monkeypatch.setattr(sync_batchnorm, "_gather_rows", lambda row, module: row[None])
    layer = sync_batchnorm.SyncBatchNorm(5, affine=affine)
    x = (torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    mean, variance, count = sync_batchnorm._global_statistics(x, layer)
    found = []
    for function, number in ((sync_batchnorm._Normalize, int(count)),
                             (sync_batchnorm._NormalizeOnCuda, count)):
        leaves = [t if t is None else t.detach().clone().requires_grad_()
                  for t in (x, layer.weight, layer.bias)]
        with emulated("CPU"):
            output = function.apply(*leaves, mean, variance, number, layer)
            output.backward(x.cos())
        found.append([output.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])

    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)


class Given(Evaluator):
    def batches(self, numbers: Any, limit: int = 0) -> Iterator[MicroBatch]:
        batch, = (m.batch for m in micro_batches()[:1])
        for number in numbers:
            yield MicroBatch(MicroBatchSpec(1, 0, number, True, (0, 1, 2, 3)), batch)


def with_table(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Outcome:
    outcome, labels = loss(model, batch), batch[1]
    return Outcome(outcome.total, outcome.count, outcome.metrics, confusion(labels, labels, 3))


@pytest.mark.parametrize("size", [2, 6])
def test_an_evaluation_is_read_once_however_many_batches_it_has(size: int) -> None:
    with waits_in() as waits:
        task = SimpleNamespace(loss=with_table)
        evaluator = Given(
            task=task, dataset=range(4 * size), model=net(),
            config=Config(task=task, batch=Batch(micro_size=2)),
            world=World(LaunchInfo(), CUDA, 1), autocast=contextlib.nullcontext,
            marks=ProgressMarks(), step=lambda: 1)
        waits.found.clear()
        scores = evaluator()

    assert scores is not None
    print(f"evaluation of {size} batches: {len(waits.found)} host waits")
    assert waits.places() == [
        "trainer/checkpoint/buffers.py:moved",  # changed in eval mode: a warning
        "trainer/run/evaluate.py:read", "trainer/run/evaluate.py:read"]  # sums, and the table
    assert not waits.unmarked()


def test_the_states_of_a_metric_are_not_waited_for() -> None:
    with waits_in() as waits:
        metric = SimpleNamespace(
            reset=lambda: None, update=lambda *_: None, to=lambda _: None, modules=lambda: [],
            hits=torch.empty((), dtype=torch.int64, device=CUDA),
            seen=[torch.empty(3, device=CUDA)])
        states = MetricStates(SimpleNamespace(), CUDA)
        states.metrics = {"own": metric}
        states._states = [(metric, "hits", operator.add), (metric, "seen", operator.add)]
        waits.found.clear()
        for number in range(3):
            states.add(number, ((), ()))

    assert not waits.found


@pytest.mark.parametrize("task", [
    Images(), Spiral(label_smoothing=0.1), Shapes(images=16), Text(context=16),
    Shapes(images=16, target="labels", balanced=True)], ids=str)
def test_the_loss_of_a_shipped_task_never_waits(task: Any) -> None:
    data = task.dataset("train")
    batch = batches.collate([data[0], data[1]])
    with waits_in() as waits:
        with CUDA:
            model = task.model()
        on_cuda = tree_map(lambda t: torch.empty_like(t, device=CUDA), batch)
        task.loss(model.train(), on_cuda)
        waits.found.clear()  # constants are copied once
        task.loss(model.train(), on_cuda)
        with torch.no_grad():
            task.loss(model.eval(), on_cuda)

    print(f"{task}: {len(waits.found)} host waits")
    assert not waits.found
    assert not waits.unordered


def test_cross_entropy_of_each_position_has_a_deterministic_kernel() -> None:
    with waits_in() as waits:
        total, count = losses.named("cross-entropy")(
            torch.empty(2, 3, 4, 4, device=CUDA), torch.zeros(2, 4, 4, dtype=int, device=CUDA))

    assert (total.shape, count) == ((), 32)
    assert not waits.unordered


OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}), "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW capturable": (torch.optim.AdamW, {"capturable": True}),
    "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    **{cls.__name__: (cls, {}) for cls in (
        torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad,
        torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor)},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_state_is_where_the_optimizer_keeps_it(name: str) -> None:
    optimizer, options = OPTIMIZERS[name]
    found = []
    with emulated("Meta"), waits_in(applied) as waits:
        for restored in (False, True):
            step = make_step(optimizer, **options)
            batch = micro_batches()
            step(batch)
            if restored:
                saved = {n: torch.empty(t.shape, dtype=t.dtype)
                         for n, t in step.state.optimizer_tensors().items()}
                facts = step.state.optimizer_facts()
                step.optimizer.state.clear()
                step.state.load_optimizer(saved, facts)
            waits.found.clear()
            step(batch)
            devices = {n: t.device.type for n, t in step.state.optimizer_tensors().items()}
            found.append((devices, waits.places()))

    print(f"{name}, after a restore: {len(found[1][1])} host waits")
    assert found[0] == found[1]
    assert name not in ("AdamW", "AdamW fused", "SGD", "SGD fused") or found[0][1] == [SUMS]
