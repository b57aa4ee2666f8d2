"""`check_task` finds each violation of the requirements on a task, and accepts correct tasks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import cached_property
from typing import Any

import pytest
import torch
from brought_task import Penalty, Slope
from tape_task import Tape, Tokens
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from trainer import Outcome
from trainer.config.schema import Optim
from trainer.optim.named_optimizers import optimizer_of, turns_of
from trainer.task import METHOD_ARGUMENTS, REQUIRED_METHODS
from trainer.tasks.images import Images
from trainer.testing import check_task


class Points(Dataset):
    """Sample i is (x_i, y_i)."""

    def __init__(self, count: int = 10) -> None:
        self.x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum()


@dataclasses.dataclass(frozen=True)
class Good:
    """Least squares: the base of the broken tasks."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def dataset(self, split: str) -> Any:
        return Points() if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        error = (model(batch[0]).squeeze(1) - batch[1]).square()
        return Outcome(error.sum(), len(error), {"error": (error.detach().sum(), len(error))})


def with_data(make: Any, split: str = "train") -> Any:
    class Changed(Good):
        def dataset(self, wanted: str) -> Any:
            return make() if wanted == split else super().dataset(wanted)

        def model(self) -> nn.Module:
            return nn.Linear(3, 1)

    return Changed()


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def summed(model: nn.Module, batch: Any) -> Outcome:
    return Outcome(squares(model, batch).sum(), len(batch[0]))


def denoising(model: nn.Module, batch: Any) -> Tensor:
    """Random times and noise, as of a diffusion model, also in evaluation."""
    times = torch.randint(1, 9, (len(batch[0]), 1)) / 9
    noise = torch.randn_like(batch[0]) * torch.empty(len(times), 1).uniform_(1, 2)
    return (model(batch[0] * (1 - times) + noise * times) - noise).square().sum(1)


def with_loss(loss: Any, model: Any = None) -> Any:
    class Changed(Good):
        def loss(self, model: nn.Module, batch: Any) -> Outcome:
            return loss(model, batch)

        def model(self) -> nn.Module:
            return model() if model is not None else nn.Linear(3, 1)

    return Changed()


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from (Points()[i] for i in range(10))


class Partly(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.unused = nn.Linear(2, 2)


class Mixed(Good):
    """Mixes the samples of a batch with each other, by numbers drawn for all of them."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        share, other = random.random(), torch.randperm(len(x))
        return x.lerp(x[other], share), y.lerp(y[other], share)


class Nodes(Good):
    """Batches of concatenated nodes, which can't be cut; one number is drawn for all of them."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def draw(self, x: Tensor) -> Tensor:
        return x * random.choice([1, 2, 3, 4])

    def collate(self, samples: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return {"nodes": self.draw(x.repeat_interleave(3, 0)), "size": y}

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        error = model(batch["nodes"]).square()
        return Outcome(error.sum(), len(batch["size"]))


class DroppedNodes(Nodes):
    """A number is drawn for each of them."""

    def draw(self, x: Tensor) -> Tensor:
        return x[torch.rand(len(x)) > 0.5]


class MeanOfNodes(Nodes):
    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        return Outcome(model(batch["nodes"]).square().mean(), len(batch["size"]))


class Derived(nn.Linear):
    """Keeps its input as an attribute, to derive by it."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.x = x.clone().requires_grad_(True)
            y = super().forward(self.x).square()
            return y + torch.autograd.grad(y.sum(), self.x, create_graph=True)[0].sum(1, True)


class Rough(nn.Module):
    """Adds gradients of many positions in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.place = nn.Buffer(torch.randn(2, 4096, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm((x[:, None] * self.place[0]).bfloat16()) * self.place[1]
        return y.float().sum((1, 2))[:, None] / 64


def problems(task: Any, **arguments: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check_task(task, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("task", [
    Good(), Images(), Images(norm="group", augment="flip+crop", dropout=0.1), Tokens(),
    Tape(norm="batch", dropout=0.2, validation=3), with_data(Stream),
    *(with_data(lambda count=count: Points(count)) for count in (1, 2, 3)),  # less than a batch
    # Its vectors move without samples.
    with_loss(summed, lambda: nn.utils.spectral_norm(nn.Linear(3, 1))),
    with_loss(summed, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 1))),
    with_loss(lambda m, b: Outcome(denoising(m, b).sum(), len(b[0]))),
    with_loss(lambda m, b: Outcome(denoising(m, b)[torch.randperm(len(b[0]))[:2]].sum(), 2)),
    Mixed(), Nodes(), DroppedNodes(), with_loss(summed, Derived), with_loss(summed, Rough),
    with_loss(summed, lambda: nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))),
], ids=lambda task: type(task).__name__)
def test_a_correct_task_passes(task):
    check_task(task)


def test_the_check_moves_no_generator(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()

    check_task(Good())

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_cached_data_and_values_of_the_last_batch_are_no_state():
    class Cached(Good):
        @cached_property
        def points(self) -> Points:
            return Points()

        def dataset(self, split: str) -> Any:
            return self.points if split == "train" else None

        def model(self) -> nn.Module:
            return Tracing()

    class Tracing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    check_task(Cached())


HIDDEN = [random.Random()] * 100
MADE: list[float] = []


def reading(read: Any) -> Any:
    """Makes points whose inputs are read by a function of the data set and the index."""
    class Read(Points):
        def __init__(self) -> None:
            super().__init__()
            MADE.append(0.0)
            self.number, self.reads, self.kept = len(MADE), 0, dict[int, Tensor]()

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            return read(self, index), self.x[index].sum()

    return Read


def keep(data: Any, index: int) -> Tensor:
    if index not in data.kept:
        data.kept[index] = data.x[index] + torch.randn(3)
    return data.kept[index]


class Moving(IterableDataset):
    """Keeps its position in the data set."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 100:
            self.at += 1
            yield torch.full((3,), float(self.at)), torch.ones(())


@pytest.mark.parametrize(("task", "problem"), [
    (with_data(reading(lambda data, i: data.x[i] + data.reads)),
     "differ when they are read again under the same key"),
    (with_data(reading(lambda data, i: data.x[i] + HIDDEN[0].random())),
     "differ when they are read again"),
    (with_data(reading(lambda data, i: data.x[i] + data.number)),
     "between two data sets created one after the other"),
    (with_data(reading(keep)), "cache the random numbers of their first read"),
    (with_data(reading(lambda data, i: {}["no such file"]), "test"),
     "of epoch 0 raised KeyError: 'no such file'"),
    (with_data(lambda: None), 'dataset("train") returned None'),
    (with_data(lambda: Points(0)), 'dataset("train") is empty'),
    (with_data(Moving), "a second iteration over the training stream gives other samples")])
def test_broken_data_are_found(task, problem):
    assert problem in problems(task)


SCALE = nn.Parameter(torch.ones(()))
CALLS = itertools.count(1)


@pytest.mark.parametrize(("loss", "problem"), [
    (lambda m, b: Outcome(squares(m, b).sum() * math.nan, len(b[0])), "step 1: loss nan on"),
    (lambda m, b: Outcome(squares(m, b).sum().detach(), len(b[0])), "the task's loss has no graph"),
    (lambda m, b: Outcome(squares(m, b).sum(), 0), "the sum of Outcome.count over all"),
    (lambda m, b: {}["no"], "its first steps raised KeyError: 'no'"),
    (lambda m, b: Outcome(squares(m, b).sum() * SCALE, len(b[0])),
     "no parameters of the model (Parameter of shape ())"),
    (lambda m, b: Outcome(squares(m, b).sum() * next(CALLS), len(b[0])),
     "a second computation of the first micro-batch gives another"),
    (lambda m, b: Outcome(squares(m, b).sum() + 1, len(b[0])), "return the sum over the samples"),
    (lambda m, b: Outcome(squares(m, b).sum() / max(1, len(b[0])), len(b[0])),
     "Outcome.total of a batch is"),
    (lambda m, b: Outcome(denoising(m, b).mean(), len(b[0])), "Outcome.total of a batch is"),
    (lambda m, b: Outcome(squares(m, b).sum(), len(b[0]) and 1), "Outcome.count of a batch is 1"),
    (lambda m, b: Outcome(squares(m, b).sum(), len(b[0]), {"e": (len(b[0]) and 3, len(b[0]))}),
     "the sum of 'e' of a batch is 3")])
def test_a_loss_that_breaks_the_protocol_is_found(loss, problem):
    assert problem in problems(with_loss(loss))


@pytest.mark.parametrize(("task", "problem"), [
    (MeanOfNodes(), "Outcome.total of a batch is"),
    (Slope(), "the gradient of weight, bias for a batch is not the sum"),
    (Penalty(), "the loss can't be computed without gradients, as a")])
def test_what_only_the_batch_the_gradient_or_a_validation_shows_is_found(task, problem):
    assert problem in problems(task)


def test_all_problems_before_a_refusal_are_listed():
    def loss(model: nn.Module, batch: Any) -> Outcome:
        return Outcome(squares(model, batch).sum() / len(batch[0]), len(batch[0]))

    class Both(type(with_loss(loss, Partly))):  # type: ignore[misc]
        def training_step(self) -> None: ...

    warned, refused = problems(Both()).split("\n- ")[1:]

    assert "training_step() isn't called" in warned
    assert "return the sum over the samples" in refused
    assert "gives no gradient to unused.weight, unused.bias" in problems(with_loss(summed, Partly))


class Hiding(nn.Linear):
    """Has hidden state that the training forward changes by `change`."""

    def __init__(self, change: Any) -> None:
        super().__init__(3, 1)
        self.change, self.number, self.history = change, 0, list[float]()
        self.identity = id(self)  # differs between two models, and no forward changes it
        self.mean, self.holder = torch.zeros(3), {"deep": [torch.zeros(3)]}
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x):
            self.change(self, x)
        return super().forward(x)


@pytest.mark.parametrize(("path", "change"), [
    ("number", lambda model, x: setattr(model, "number", model.number + 1)),
    ("mean", lambda model, x: setattr(model, "mean", 0.9 * model.mean + 0.1 * x.mean(0))),
    ("holder", lambda model, x: model.holder["deep"][0].add_(1)),
    ("history", lambda model, x: model.history.append(x.detach().sum().item())),
    ("passing", lambda model, x: model.passing.add_(x.sum(0)))])
def test_state_outside_parameters_and_buffers_is_found(path, change):
    task = with_loss(summed, lambda: nn.Sequential(nn.Linear(3, 3), Hiding(change)))

    assert f"forward changes 1.{path}" in problems(task)


@pytest.mark.parametrize("change", [
    lambda model, x: None, lambda model, x: x.add_(torch.randn(3, generator=model.generator))])
def test_no_hidden_state_is_found_in_a_model_without_it_or_with_a_keyed_generator(change):
    check_task(with_loss(summed, lambda: Hiding(change)))


def test_fields_may_have_the_names_of_optional_methods() -> None:
    names = (*(METHOD_ARGUMENTS.keys() - {*REQUIRED_METHODS}), "preload", "preview", "turns",
             "weights", "labels", "lengths")
    task = dataclasses.make_dataclass("Named", [(name, str, "text") for name in names],
                                      bases=(Good,), frozen=True)()

    check_task(task)
    assert turns_of(optimizer_of(Optim(), task.model(), task)) == ("",)
