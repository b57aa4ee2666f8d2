"""Hints: each check reports the mistakes that it should and nothing else; each hint once."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.config.schema import HINTS
from trainer.run.recorders import _zero_gradients
from trainer.telemetry import hints
from trainer.telemetry.events import Log
from trainer.telemetry.hints import HintFacts, Hints

FALLING = [2.3 * 0.99**i + 0.01 * (i % 3) for i in range(200)]
FLAT = [2.3 + 0.01 * (i % 3) for i in range(200)]
STEADY, GROWING = [1.0 + 0.1 * (i % 5) for i in range(200)], [1.02**i for i in range(200)]


@pytest.mark.parametrize(("why", "expected"), [
    (hints.check_first_loss(230.3, math.log(10)), "the first loss is 230.3"),
    (hints.check_first_loss(0.02, math.log(10)), "2.303 (the logarithm of 10 classes)"),
    (hints.check_first_loss(2.5, math.log(10)), ""),
    (hints.check_first_loss(1.0, 1000.0), "an untrained model has 1000"),
    (hints.check_flat_loss(FLAT), "2.31 at the beginning and is 2.31"),
    (hints.check_flat_loss([9.0] * 20 + FLAT, 2.3), "was 2.3 at the beginning"),
    (hints.check_flat_loss(FALLING, 2.3), ""),
    (hints.check_flat_loss(FLAT[:90]), ""),
    (hints.check_rising_norm(GROWING, FLAT), "the gradient norm rises, from"),
    (hints.check_rising_norm(GROWING, FALLING), ""),
    (hints.check_rising_norm(STEADY, FLAT), ""),
    (hints.check_clipped([8.0, 9.0, 10.0] * 20, 1.0), "9.0 times --clip.norm 1"),
    (hints.check_clipped([8.0, 9.0, 10.0] * 20, 0.0), ""),
    (hints.check_batchnorm(8), "over 8 samples, fewer than 16"),
    (hints.check_batchnorm(16), ""),
    (hints.check_batchnorm(None), ""),
    (hints.check_sizes([("head", 50257), ("fc", 10), ("body", 64)], 32), "head 50257"),
    (hints.check_sizes([("body", 64)], 30), "--batch.micro-size 30"),
    (hints.check_idle_memory(2 << 30, 80 << 30, 8, 64), "2.0 of 80 GiB"),
    (hints.check_idle_memory(2 << 30, 80 << 30, 64, 64), ""),
    (hints.check_idle_memory(60 << 30, 80 << 30, 8, 64), ""),
    (hints.check_dead_gradients([["a"], ["a", "b"], ["a"]]), "the gradient of a was exactly zero"),
    (hints.check_dead_gradients([["a"], ["b"], ["a"]]), ""),
    (hints.check_dead_gradients([["a"], ["a"]]), ""),
    (hints.check_easy_validation({"val_loss": 0.1, "val_accuracy": 0.97}, [1.0] * 9, [0.6] * 9),
     "an accuracy of 0.970"),
    (hints.check_easy_validation({"val_loss": 0.4, "val_accuracy": 0.86}, [1.0] * 9, [0.8] * 9),
     ""),
    (hints.check_easy_validation({"val_loss": 0.4}, [1.0] * 9, []), "a loss of 0.4"),
    (hints.check_easy_validation({"val_loss": None}, [1.0] * 9, []), ""),
    (hints.check_overfitting([(1, 1, 1), (2, 0.6, 0.8), (3, 0.5, 0.9), (4, 0.3, 0.95),
                              (5, 0.1, 1.0)]), "best at step 2"),
    (hints.check_overfitting([(1, 1, 1), (2, 0.1, 0.1), (3, 0.09, 0.12), (4, 0.08, 0.12),
                              (5, 0.07, 0.13)]), ""),
    (hints.check_overfitting([(1, 1, 0.5), (2, 1, 0.8), (3, 1, 0.9), (4, 1.2, 0.9)]), ""),
    (hints.check_constant_rate([1e-3] * 60), "has been 0.001 at each step"),
    (hints.check_constant_rate([1e-3] * 60 + [9e-4]), "")])
def test_a_check_returns_the_evidence_or_nothing(why, expected):
    assert expected in why if expected else why == ""


def step(number: int, loss: float | None = 1.0, norm: float = 1.0, lr: float = 1.0) -> dict:
    return {"step": number, "loss": loss, "grad_norm": norm, "lr": lr}


def made(stream: Any = None, **options: Any) -> Hints:
    facts = {"total": 400, "epoch": 100, "clip_norm": 0.0, "micro_size": 8, "per_rank": 8}
    given = {name: options.pop(name) for name in list(options) if name in HintFacts.__annotations__}
    log = Log(stream=stream or io.StringIO())
    return Hints(log, HintFacts(**{**facts, **given}), done=options.pop("done", set()), **options)


def lines(hints: Hints) -> list[str]:
    return hints._log._stream.getvalue().splitlines()  # type: ignore[union-attr]


def test_a_hint_is_one_line_with_its_documentation_and_its_flag():
    given = made()

    for number in range(1, 401):
        given.step(step(number), {"step": 1.0})
    given.finish({}, {}, 400)

    flat, rate = lines(given)
    assert flat.startswith("hint: the loss doesn't fall")
    assert flat.endswith("(docs/hints.md#flat-loss; --log.hints-off flat-loss)")
    assert "constant-rate" in rate


def test_a_hint_that_is_off_or_was_given_before_is_not_given():
    given = made(done={"flat-loss", "constant-rate"})

    for number in range(1, 401):
        given.step(step(number), {"step": 1.0})

    assert lines(given) == []


def test_only_a_part_of_the_steps_of_a_long_run_is_kept():
    given = made(total=100_000)

    for number in range(1, 10_001):
        given.step(step(number, loss=None if number % 7 == 0 else 1.0), {"step": 1.0})

    assert len(given._points) <= hints.MOST_POINTS
    assert "flat-loss" in lines(given)[0]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_parameter_without_elements_has_no_dead_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(0, 1, bias=False))
    model[2].weight.grad = torch.zeros(1, 0)
    assert _zero_gradients(model) == []

    model[:2](torch.ones(1, 3)).mul(torch.tensor([0.0, 1.0])).sum().backward()
    model[1].bias.grad.zero_()
    assert _zero_gradients(model) == ["1.bias"]


def test_the_first_loss_is_compared_with_the_number_of_classes():
    given = made()
    given.step(step(1, loss=100.0), {"step": 1.0})

    given.validation({"step": 1, "train_loss": 1.0, "val_loss": 1.0, "val_table": [[1, 0], [0, 1]]})

    assert "0.6931 (the logarithm of 2 classes)" in lines(given)[0]


def test_each_hint_has_a_section_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs/hints.md").read_text()

    assert [line.removeprefix("## ") for line in page.splitlines()
            if line.startswith("## ")] == list(HINTS)
