"""A small task for evaluations, with batch norm, metrics, a table and figures."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainer import Outcome
from trainer.tasks import losses
from trainer.telemetry.classification import confusion, macro


class Net(nn.Module):
    """Two layers with a norm between them; `drift` changes each output, and below 0 adds
    random draws."""

    def __init__(self, drift: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.drift, self.calls = drift, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.drift > 0
        x = self.head(self.body(x)) + self.drift * self.calls
        return x + self.drift * torch.randn_like(x) if self.drift < 0 else x


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :3].argmax(1)


@dataclasses.dataclass(frozen=True)
class Small:
    """Classify which of the first three of six numbers is the largest."""

    drift: float = 0.0

    def model(self) -> nn.Module:
        return Net(self.drift)

    def dataset(self, split: str) -> TensorDataset:
        count, seed = {"train": (96, 0), "validation": (50, 1), "test": (30, 2),
                       "predict": (7, 3)}[split]
        return TensorDataset(*samples(count, seed))

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        x, y = batch
        logits = model(x)
        found = logits.argmax(1)
        return Outcome(*losses.named("cross-entropy")(logits, y),
                       metrics={"accuracy": ((found == y).sum(), len(y))},
                       table=confusion(found, y, 3))

    def figures(self) -> dict[str, Any]:
        return {"f1": macro("f1")}


@dataclasses.dataclass
class Answer:
    """The output of a model as libraries return it: with a scalar and with an object."""

    logits: Tensor
    mean: Tensor
    cache: object
    states: tuple[Tensor, ...]


class Answering(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        answer = Answer(logits, logits.mean(), object(), (logits + 1,))
        return answer if self.drift else vars(answer)


@dataclasses.dataclass(frozen=True)
class Answers(Small):
    """The same weights and data with a model that returns a dataclass, or with `drift` 0 a dict."""

    def model(self) -> nn.Module:
        return Answering(self.drift)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        answer = model(batch[0])
        logits = answer["logits"] if isinstance(answer, dict) else answer.logits
        return Outcome(*losses.named("cross-entropy")(logits, batch[1]))


Pair = namedtuple("Pair", ["word", "number"])


@dataclasses.dataclass(frozen=True)
class Spoken(Small):
    """Answers that are no tensors, in a form that `kind` names."""

    kind: str = "strings"

    def predict(self, model: nn.Module, batch: Any) -> Any:
        chosen = model(batch[0]).argmax(1)
        words = ["abc"[n] * (n + 1) for n in chosen.tolist()]
        boxes = [torch.full((n + 1, 2), float("nan")) for n in chosen.tolist()]
        answers: dict[str, Any] = {
            "strings": words, "named": {"word": words, "class": chosen},
            "pair": Pair(np.array(words), chosen.numpy()),
            "padded": torch.ones(len(words), len(words)).to_sparse(),
            "objects": [Answer(box, box.sum(), None, ()) for box in boxes],
            "dicts": [{"boxes": box, "word": word} for box, word in zip(boxes, words, strict=True)],
            "foreign": [object() for _ in words], "short": words[1:]}
        return answers[self.kind]


class Classifier(nn.Sequential):
    """A model of grey images, for --task.model."""

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, classes))


class Held:
    """The same as a plain object with tensors in memory, which acts at its `at`-th micro-batch."""

    def __init__(self, at: int = 0, act: Callable[[], None] | None = None) -> None:
        self.x, self.y = samples(96, 0)
        self.at, self.act, self.seen = at, act, [0]

    def model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> TensorDataset | None:
        return {"train": TensorDataset(self.x, self.y),
                "validation": TensorDataset(*samples(50, 1))}.get(split)

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        if model.training:
            self.seen[0] += 1
            if self.seen[0] == self.at and self.act is not None:
                self.act()
        return Small().loss(model, batch)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def interrupt_twice() -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise KeyError("the user's own mistake")


def process_state() -> list[Any]:
    """State of the process that a library call must not change."""
    return [[signal.getsignal(number) for number in signal.valid_signals()],
            torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            threading.active_count(), len(os.listdir("/proc/self/fd"))]


@dataclasses.dataclass(frozen=True)
class Parts(Small):
    """Its loss calls parts of the model."""

    def loss(self, model: Any, batch: Any) -> Outcome:
        return super().loss(nn.Sequential(model.body, model.head), batch)
