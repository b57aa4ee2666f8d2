"""What is made, and found wrong, before a run folder is touched."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer.config.schema import Batch, Config, Parallel, WorldConfig
from trainer.distributed.device import OMP
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.run import startup_summary
from trainer.run.prepare import prepare
from trainer.run.startup_checks import UNORDERED, check_data, recall
from trainer.task import ObjectTask, Outcome, check_outcome, uncalled_methods
from trainer.testing import check_task


class Items(Dataset):
    """20 samples, made by a function of the index."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@dataclasses.dataclass(frozen=True)
class Made:
    """A task of any samples and any model."""

    make: Any = float
    net: Any = dataclasses.field(default_factory=lambda: lambda: nn.Linear(2, 1))

    def model(self) -> nn.Module:
        return self.net()

    def dataset(self, split: str) -> Dataset | None:
        return Items(self.make) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise AssertionError("nothing is trained here")


def prepared(task: Made, device: str = "cpu", **sections: Any) -> Any:
    world = World(LaunchInfo(), torch.device(device), threads=torch.get_num_threads())
    return prepare(config_of(task, **sections), world)


def config_of(task: Made, **sections: Any) -> Any:
    return Config(task=task, batch=Batch(global_size=4, micro_size=2), **sections)


def test_a_method_that_cannot_be_called_as_it_will_be_is_refused_at_once():
    class Forgetful(Made):
        def loss(self, batch: Any) -> Any:  # type: ignore[override]
            raise AssertionError("nothing is trained here")

    for task in (Forgetful(), ObjectTask.of(Forgetful())):
        with pytest.raises(ConfigError, match=r"loss\(batch.*is called as loss\(model, batch\)"):
            prepared(task)


def fingerprint(make: Any) -> str:
    return prepared(Made(make=make)).fingerprints["train"]


@pytest.mark.parametrize(("width", "sections", "omp", "expected"), [
    (2, {}, None, (1, "a small model")), (600, {}, None, (6, "")),
    (2, {"world": WorldConfig(threads=6)}, None, (6, "")),
    (300, {"parallel": Parallel(reduction="canonical")}, None,
     (1, "--parallel.reduction canonical")),
    (2, {"parallel": Parallel(reduction="canonical")}, 5, (5, OMP))])
def test_the_threads_follow_from_configuration_and_model(width, sections, omp, expected):
    world = World(LaunchInfo(), torch.device("cpu"), threads=6)
    before = torch.get_num_threads()
    try:
        world.use_threads(omp or 6, OMP if omp else "")
        config: Any = Config(
            task=Made(net=lambda: nn.Linear(width, 512)), steps=1,
            batch=Batch(global_size=8, micro_size=8), **sections)
        prepare(config, world)
        assert (world.threads, world.threads_reason) == expected
        assert torch.get_num_threads() == world.threads
    finally:
        torch.set_num_threads(before)


def test_a_validation_set_that_differs_between_ranks_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Drawn(Made):
        rank: int = 0

        def dataset(self, split: str) -> Dataset | None:
            return Items(lambda i: i + self.rank * (split == "validation"))

    with pytest.raises(ConfigError, match=r'dataset\("validation"\) on rank 1 .20 samples'):
        check_two([Drawn(rank=rank) for rank in (0, 1)])


def check_two(tasks: list[Any]) -> Any:
    """Check the data of two ranks."""
    works = [prepared(task, steps=1) for task in tasks]

    class Two:
        fail_together = staticmethod(lambda function: function())

        def gather_json(self, value: Any) -> list[Any]:
            return [work.fingerprints for work in works] if isinstance(value, dict) else [value] * 2

    return check_data(works[0], Two(), config_of(tasks[0]))  # type: ignore[arg-type]


class Unordered(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.randperm(1000, generator=torch.Generator().manual_seed(
            int.from_bytes(os.urandom(4)))))


class UnorderedLanes(Unordered):
    def lane(self, number: int, lanes: int) -> Any:
        return iter(self)


def test_a_stream_without_a_reproducible_order_needs_lanes_on_two_ranks():
    @dataclasses.dataclass(frozen=True)
    class Streaming(Made):
        def dataset(self, split: str) -> Any:
            return self.make() if split == "train" else None

    with pytest.raises(ConfigError, match=r"other samples in each reading.*in_order=True"):
        check_two([Streaming(Unordered)] * 2)
    checked = check_two([Streaming(UnorderedLanes)] * 2)

    assert checked.fingerprints["train"] == UNORDERED
    again = recall(prepared(Streaming(UnorderedLanes), steps=1), {"data": UNORDERED})
    assert again.fingerprints == checked.fingerprints


class Graph:
    """What no default collate can stack; two of them refer to each other."""

    def __init__(self, nodes: int) -> None:
        self.nodes = torch.arange(nodes)
        self.twin: Any = self


@dataclasses.dataclass(slots=True)
class Pair:
    left: Any
    right: Any


def test_a_size_that_is_said_to_fit_more_ranks_divides_the_batch():
    world = World(LaunchInfo(size=20), torch.device("cpu"), threads=torch.get_num_threads())
    config: Any = Config(task=Made(), batch=Batch(global_size=128, micro_size=32))

    with pytest.raises(ConfigError, match="use at most 4 ranks, or a micro-size of 4 or less"):
        prepare(config, world)


@pytest.mark.parametrize(("figures", "told"), [
    (None, "returned None; return a dict of name: function"), (["f1"], r"returned \['f1'\]"),
    ({"f1": 0.5}, "returned {'f1': 0.5}"),
    ({"loss": lambda means, table: 0.5}, "has 'loss', but val_loss is reserved")])
def test_figures_that_are_none_are_refused_before_anything_starts(figures, told):
    class Judged(Made):
        def figures(self) -> Any:
            return figures

    with pytest.raises(ConfigError, match=rf"--task: figures\(\) {told}"):
        prepared(Judged())


def test_parameters_that_no_group_of_the_task_has_are_told():
    class Grouped(Made):
        def parameter_groups(self, model: Any) -> Any:
            return [{"params": [next(model.parameters())]}]

    work = prepared(Grouped())

    names = [name for name, _ in work.model.named_parameters()][1:]
    assert work.card["untrained"] == names
    [warning] = startup_summary.startup_warnings(Config(task=Grouped()), work.card, warmup=1,
                                                 total=99)
    assert names[0] in warning


SAMPLES: dict[str, tuple[Any, Any]] = {
    "objects": (Graph, lambda i: Graph(i + 1)),
    "None": (lambda i: (i, None), lambda i: (i, 0)),
    "ragged tensors": (lambda i: [torch.zeros(i)], lambda i: [torch.zeros(i + 1)]),
    "the same bytes in another form": (lambda i: torch.zeros(2, 3), lambda i: torch.zeros(3, 2)),
    "the same bytes of another type": (lambda i: torch.zeros(2), lambda i: torch.zeros(2).int()),
    "texts": (lambda i: {"text": f"no. {i}"}, lambda i: {"text": f"No. {i}"}),
    "arrays": (lambda i: np.full(2, i), lambda i: np.full(2, i + 1)),
    "arrays of objects": (lambda i: np.array(["a", None]), lambda i: np.array(["b", None])),
    "numbers": (lambda i: i, float),
    "dataclasses": (lambda i: Pair(i, "x"), lambda i: Pair(i, "y")),
    "sets": (lambda i: {"a", "b"}, lambda i: {"a", "c"}),
    "bfloat16": (lambda i: torch.tensor(i).bfloat16(), lambda i: torch.tensor(i + 1).bfloat16()),
    "nested": (lambda i: torch.nested.nested_tensor([torch.zeros(i)], layout=torch.jagged),
               lambda i: torch.nested.nested_tensor([torch.ones(i)], layout=torch.jagged)),
    "sparse": (lambda i: torch.eye(2).to_sparse(), lambda i: (2 * torch.eye(2)).to_sparse())}


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_fingerprint_needs_no_collate_and_tells_samples_apart(kind):
    one, another = SAMPLES[kind]

    assert fingerprint(one).startswith("20 samples ")
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(another)


class Complex(nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64), persistent=persistent)


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 1)
    model.register_buffer("more", buffer)
    return model


def saving(change: Any, net: Any = nn.Linear) -> nn.Module:
    """A model with another state_dict."""
    return type("Saving", (net,), {"state_dict": lambda self, *args, **kwargs: change(
        net.state_dict(self, *args, **kwargs))})(4, 1)


def test_methods_that_other_trainers_call_are_named_with_what_is_called_here():
    class Foreign(Made):
        def collate_fn(self, samples: Any) -> Any:
            return samples

        configure_optimizers = training_step = collate_fn

    class Both(Made):  # a helper of a known name beside what is called
        collate = collate_fn = Foreign.collate_fn

    told = uncalled_methods(Foreign())

    assert told.startswith("Foreign: collate_fn() isn't called; instead define collate(samples)")
    assert "training_step() isn't called; instead define loss(model, batch)" in told
    assert "configure_optimizers() isn't called; " in told
    assert "instead define optimizers(model), or parameter_groups(model)" in told
    assert uncalled_methods(Both()) == uncalled_methods(Made()) == ""
    with pytest.raises(AssertionError, match=r"collate_fn\(\) isn't called"):
        check_task(Foreign())


def test_data_that_are_no_data_set_are_refused():
    class Loaded(Made):
        def dataset(self, split: str) -> Any:
            return DataLoader(Items(float)) if self.make is float else iter(Items(float))

    with pytest.raises(ConfigError, match=r'"train"\) returned a DataLoader; return a Dataset'):
        prepared(Loaded())
    with pytest.raises(ConfigError, match=r'"train"\) returned a iterator; return a Dataset'):
        prepared(Loaded(make=int))


@pytest.mark.parametrize(("net", "told"), [
    (Complex, r"phase: safetensors has no dtype torch\.complex64, so a checkpoint cannot"),
    (lambda: saving(lambda state: {**state, "calls": {}}), "'calls', a dict, but a checkpoint"),
    (lambda: nn.LazyLinear(1), r"weight has no values yet \(a lazy module"),
    (lambda: nn.Linear(2, 1, device="meta"), r"weight has no values yet"),
    (lambda: with_buffer(torch.eye(2).to_sparse()), "more is sparse, and a checkpoint cannot hold"),
    (lambda: saving(lambda state: {"weight": state["weight"]}),
     r"bias of the model doesn't come back from its state_dict"),
    (lambda: saving(lambda state: {n: t[:3] for n, t in state.items()}, nn.Embedding),
     r"weight of the model doesn't come back"),
    (lambda: saving(lambda state: {n: t.half() for n, t in state.items()}),
     r"weight, bias of the model doesn't come back")])
def test_a_model_that_no_checkpoint_could_hold_is_refused_with_what_it_has(net, told):
    with pytest.raises(ConfigError, match=rf"--task: .*{told}"):
        prepared(Made(net=net))


def test_what_is_not_part_of_the_state_may_be_of_any_kind():
    assert prepared(Made(net=lambda: Complex(persistent=False))).card["parameters"] == 2


def test_a_synchronised_batch_norm_is_refused_where_ranks_may_come_and_go():
    task = Made(net=lambda: nn.Sequential(nn.Linear(2, 1), nn.SyncBatchNorm(1)))
    canonical = Parallel(reduction="canonical")

    assert prepared(task)
    with pytest.raises(ConfigError, match=r"^--parallel\.reduction canonical: 1 of the model is a "
                                          r"SyncBatchNorm.*Use nn\.BatchNorm"):
        prepared(task, parallel=canonical)
    with pytest.raises(ConfigError, match=r"^--parallel\.sync-bn on: statistics"):
        Parallel(reduction="canonical", sync_bn="on")


@pytest.mark.parametrize(("wrong", "told"), [
    ({"count": None}, "Outcome.count is a NoneType"),
    ({"count": -2}, "Outcome.count is -2"),
    ({"count": float("nan")}, "Outcome.count is nan"),
    ({"metrics": None}, "Outcome.metrics is a NoneType; use a dict"),
    ({"metrics": [("a", (1, 1))]}, "Outcome.metrics is a list; use a dict"),
    ({"total": torch.ones((), dtype=torch.complex64)}, "Outcome.total is () torch.complex64"),
    ({"metrics": {"a": torch.ones(())}}, "the metric 'a' is () torch.float32; use (sum, count)"),
    ({"metrics": {"a": (None, 1)}}, "of the metric 'a' are a NoneType and a int"),
    ({"metrics": {"a": (torch.ones(2), 1)}}, "are (2,) torch.float32 and a int")])
def test_an_outcome_of_what_is_no_number_is_refused(wrong, told):
    with pytest.raises(ConfigError) as error:
        check_outcome(Outcome(**{"total": torch.zeros(()), "count": 1, **wrong}))

    assert told in str(error.value)
