"""Hints: warn once about each probable mistake in a training run, from data that exists anyway.

A check is a pure function that returns the evidence as a text, or "" if it finds no mistake.
docs/hints.md describes each hint and its remedy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import listed
from trainer.telemetry.drawing import is_matrix
from trainer.telemetry.events import Log
from trainer.telemetry.metrics import Sink

MOST_POINTS = 1024
"""Largest number of steps that are kept. A longer run keeps every second, then every fourth, …"""
LOOKS = 20
"""Number of checks in a run, besides those at validations; at most one in 50 steps."""
DEAD_LOOKS = 3
"""A gradient must be exactly zero at this many consecutive checks."""
MIN_BATCHNORM_SAMPLES = 16


def check_first_loss(measured: float, expected: float) -> str:
    if expected <= 0 or 0.5 <= measured / expected <= 2:
        return ""
    classes = math.exp(min(expected, 20.0))  # a larger loss is no logarithm of a number of classes
    known = abs(classes - round(classes)) < 1e-6 * classes
    return (f"the first loss is {measured:.4g}; an untrained model has {expected:.4g}"
            + f" (the logarithm of {round(classes)} classes)" * known)


def check_flat_loss(losses: Sequence[float], first: float | None = None) -> str:
    """Check whether the loss falls, also below `first`, that of the first step: at too high a rate
    the next losses are already larger."""
    if len(losses) < 100:
        return ""
    part = len(losses) // 5
    before, now = statistics.median(losses[:part]), statistics.median(losses[-part:])
    before = before if first is None else min(before, first)
    if before - now > 0.02 * abs(before):
        return ""
    return (f"the loss doesn't fall: it was {before:.4g} at the beginning and is {now:.4g} in the "
            "median of the last fifth of the steps")


def check_rising_norm(norms: Sequence[float], losses: Sequence[float]) -> str:
    start = len(norms) // 10
    part = (len(norms) - start) // 4
    if part < 25:
        return ""
    quarters = [slice(start + i * part, start + (i + 1) * part) for i in range(4)]
    medians = [statistics.median(norms[quarter]) for quarter in quarters]
    before, now = (statistics.median(losses[quarters[i]]) for i in (0, 3))
    if medians != sorted(set(medians)) or medians[3] < 4 * medians[0] or now < 0.9 * before:
        return ""
    return (f"the gradient norm rises, from {medians[0]:.3g} to {medians[3]:.3g} (medians of "
            f"quarters), and the loss doesn't fall ({before:.4g}, {now:.4g})")


def check_clipped(norms: Sequence[float], limit: float) -> str:
    if limit <= 0 or len(norms) < 50:
        return ""
    low, median, high = (statistics.quantiles(norms, n=10)[i] for i in (0, 4, 8))
    if median < 5 * limit:
        return ""
    return (f"the gradient norm is {median:.3g} in the median of the last half (10 %: {low:.3g}, "
            f"90 %: {high:.3g}), {median / limit:.1f} times --clip.norm {limit:g}: nearly "
            "every step is clipped")


def check_batchnorm(samples: int | None) -> str:
    if samples is None or samples >= MIN_BATCHNORM_SAMPLES:
        return ""
    return (f"each BatchNorm computes its statistics over {samples} samples, fewer than "
            f"{MIN_BATCHNORM_SAMPLES}")


def check_sizes(widths: Iterable[tuple[str, int]], micro_size: int) -> str:
    """Check that the widths of layers, by name, and the micro-batch size are multiples of 8."""
    odd = [f"{name} {width}" for name, width in widths if width >= 64 and width % 8]
    if micro_size > 8 and micro_size % 8:
        odd.append(f"--batch.micro-size {micro_size}")
    return f"not multiples of 8, which makes matrix units slow: {listed(odd)}" if odd else ""


def check_idle_memory(peak: int, total: int, micro_size: int, per_rank: int) -> str:
    """Check whether larger micro-batches would fit into the device memory (bytes)."""
    if micro_size >= per_rank or peak > total / 2:
        return ""
    return (f"at most {peak / 2**30:.1f} of {total / 2**30:.0f} GiB of device memory are used, "
            f"and the {per_rank} samples of a rank and step are computed {micro_size} at a time")


def check_dead_gradients(looks: Sequence[Sequence[str]]) -> str:
    """Check for gradients that stay exactly zero, by the names of these at each check so far."""
    if len(looks) < DEAD_LOOKS:
        return ""
    dead = [name for name in looks[-1] if all(name in look for look in looks[-DEAD_LOOKS:])]
    why = f"the gradient of {listed(dead)} was exactly zero at {DEAD_LOOKS} consecutive checks"
    return why if dead else ""


def check_easy_validation(
    line: Mapping[str, Any], losses: Sequence[float], accuracies: Sequence[float]
) -> str:
    """Compare a validation of the first epoch with the training steps just before it."""
    if len(losses) < 8 or line["val_loss"] is None:
        return ""
    if len(accuracies) >= 8 and line.get("val_accuracy") is not None:
        train, validated = statistics.fmean(accuracies), line["val_accuracy"]
        is_easy = 1 - validated <= 0.5 * (1 - train) and validated - train >= 0.1
        figures = f"an accuracy of {validated:.3f}, and the training steps before it {train:.3f}"
    else:
        train, validated = statistics.median(losses), line["val_loss"]
        is_easy = train > 0 and validated <= 0.5 * train
        figures = f"a loss of {validated:.4g}, and the training steps before it {train:.4g}"
    return f"in the first epoch validation has {figures}" if is_easy else ""


def check_overfitting(validations: Sequence[tuple[int, float, float]]) -> str:
    """Check whether the validation loss rises while the training loss falls (step, both losses)."""
    if len(validations) < 4:
        return ""
    best = min(range(len(validations)), key=lambda i: validations[i][2])
    (at, train_then, then), (_, train, now) = validations[best], validations[-1]
    low = min(loss for _, _, loss in validations[-3:])
    limit = then + 0.1 * max(abs(then), validations[0][2] - then)
    if len(validations) - 1 - best < 3 or low < limit or train >= train_then:
        return ""
    return (f"validation was best at step {at} (loss {then:.4g}, now {now:.4g}), while the "
            f"training loss keeps falling ({train_then:.4g}, {train:.4g})")


def check_constant_rate(rates: Sequence[float]) -> str:
    if len(rates) < 50 or min(rates) != max(rates):
        return ""
    return f"the learning rate has been {rates[0]:.3g} at each step: it has no warm-up and no decay"


@dataclass(frozen=True, kw_only=True)
class HintFacts:
    """Properties of the run that the checks need; `total` and `epoch` in steps, `per_rank`: samples
    of a global batch on each rank."""

    total: int
    epoch: int
    clip_norm: float
    micro_size: int
    per_rank: int
    expected_loss: float | None = None
    """First loss of an untrained model; None: from the number of classes; 0: not checked."""
    zero_gradients: Callable[[], list[str]] = list
    """Returns the names of the parameters whose gradient is exactly zero."""
    memory: Callable[[], tuple[int, int] | None] = lambda: None
    """Returns (largest number of bytes in use, bytes of the device), or None on a CPU."""


class Hints(Sink):
    """Sink that checks the metric lines and logs the hints.

    Args:
        done: names of the hints that are off or logged already; new ones are added.
        lines: metric lines so far: all, or some that are evenly spaced.
    """

    def __init__(self, log: Log, facts: HintFacts, *, done: set[str],
                 lines: Iterable[dict[str, Any]] = ()) -> None:
        self._log, self._facts, self._done = log, facts, done
        self._every = max(50, facts.total // LOOKS)
        self._stride = 1
        self._points: list[tuple[int, float, float, float, float | None]] = []
        self._validations: list[tuple[int, float, float]] = []
        self._looks: list[list[str]] = []
        self._first: float | None = None
        for line in lines:
            (self._note_validation if "val_loss" in line else self._note)(line)
        if self._points:  # continue at the distance of the points so far
            distance = self._points[-1][0] // len(self._points)
            self._stride = max(self._stride, 1 << max(0, distance.bit_length() - 1))

    def emit(self, name: str, why: str) -> None:
        """Log a hint with its evidence, unless that is empty or the hint is done."""
        if why and name not in self._done:
            self._done.add(name)
            self._log.event("hint", hint=name, why=why)
            self._log.info(f"hint: {why} (docs/hints.md#{name}; --log.hints-off {name})")

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        if not timing:
            return  # a step of an earlier attempt, which is in `lines`
        self._note(line)
        if not line["step"] % self._every:
            self._check(line["step"])

    def validation(self, line: dict[str, Any]) -> None:
        if not self._validations or line["step"] > self._validations[-1][0]:
            self._note_validation(line)
            self._check_validation(line)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        self._check(step)

    def _note(self, line: dict[str, Any]) -> None:
        step, (loss, norm, rate) = line["step"], map(line.get, ("loss", "grad_norm", "lr"))
        if step % self._stride or loss is None or norm is None or rate is None or "turn" in line:
            return  # losses of turns against each other need not fall
        if step == 1:
            self._first = loss
        self._points.append((step, loss, norm, rate, line.get("accuracy")))
        if len(self._points) >= MOST_POINTS:
            self._stride *= 2
            self._points = self._points[1::2]

    def _note_validation(self, line: dict[str, Any]) -> None:
        train, loss = line.get("train_loss"), line.get("val_loss")
        if train is not None and loss is not None:
            self._validations.append((line["step"], train, loss))

    def _check(self, step: int) -> None:
        facts, points = self._facts, self._points
        losses, norms = [p[1] for p in points], [p[2] for p in points]
        self._check_first(None)
        if step >= max(200, facts.total // 10):
            self.emit("flat-loss", check_flat_loss(losses, self._first))
        if step >= max(100, facts.total // 5):
            self.emit("clipped-steps", check_clipped(norms[len(norms) // 2 :], facts.clip_norm))
            self.emit("rising-norm", check_rising_norm(norms, losses))
        if step >= facts.total // 2:
            self.emit("constant-rate", check_constant_rate([p[3] for p in points]))
        if "idle-memory" not in self._done and (memory := facts.memory()) is not None:
            self.emit("idle-memory", check_idle_memory(*memory, facts.micro_size, facts.per_rank))
        if "dead-gradient" not in self._done:
            self._looks = [*self._looks, facts.zero_gradients()][-DEAD_LOOKS:]
            self.emit("dead-gradient", check_dead_gradients(self._looks))

    def _check_validation(self, line: dict[str, Any]) -> None:
        table = line.get("val_table")
        self._check_first(len(table) if table is not None and is_matrix(table) else None)
        if line["step"] <= self._facts.epoch:
            recent = self._points[-max(8, len(self._points) // 4) :]
            self.emit("easy-validation", check_easy_validation(
                line, [p[1] for p in recent], [p[4] for p in recent if p[4] is not None]))
        self.emit("overfitting", check_overfitting(self._validations))

    def _check_first(self, classes: int | None) -> None:
        expected = self._facts.expected_loss
        if expected is None and classes is not None:
            expected = math.log(classes)
        if self._first is not None and expected:
            self.emit("first-loss", check_first_loss(self._first, expected))
