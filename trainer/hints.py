"""Hints about the training: what looks wrong, by evidence that exists anyway, each said once.

A judge is a pure function: it returns the evidence as a text, or "" if nothing speaks against it.
`Hints` remembers the run's lines, on rank 0, and asks the judges at validations and about twenty
times in a run. docs/hints.md says what each is about, and what to do.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.drawing import is_matrix
from trainer.log import Log

MOST_POINTS = 1024
"""Steps that are remembered: of a longer run every second one, then every fourth, …"""
LOOKS = 20
"""How often in a run the judges are asked, beside its validations; at most every 50 steps."""
DEAD_LOOKS = 3
"""Looks in a row at which a gradient has to be exactly zero."""
LEAST_BATCHNORM = 16
CLIP_FACTOR, RISE, MEMORY_SHARE = 5.0, 4.0, 0.5


def judge_first_loss(measured: float, expected: float) -> str:
    """The loss of the first step, beside that of a model which knows nothing yet."""
    if expected <= 0 or 0.5 <= measured / expected <= 2:
        return ""
    return (f"the first loss is {measured:.4g}; a model that knows nothing yet has {expected:.4g} "
            f"(the logarithm of {round(math.exp(expected))} classes)")


def judge_flat_loss(losses: Sequence[float], first: float | None = None) -> str:
    """The losses of a run so far; the first one counts apart, since a rate that is too high drives
    it up at once."""
    if len(losses) < 100:
        return ""
    part = len(losses) // 5
    before, now = statistics.median(losses[:part]), statistics.median(losses[-part:])
    before = before if first is None else min(before, first)
    if before - now > 0.02 * abs(before):
        return ""
    return (f"the loss doesn't fall: it was {before:.4g} at the beginning and is {now:.4g} in the "
            "median of the last fifth of the steps")


def judge_rising_norm(norms: Sequence[float], losses: Sequence[float]) -> str:
    """Gradient norms and losses of the same steps."""
    start = len(norms) // 10
    part = (len(norms) - start) // 4
    if part < 25:
        return ""
    middle = [statistics.median(norms[start + i * part : start + (i + 1) * part])
              for i in range(4)]
    before, now = (statistics.median(losses[i : i + part])
                   for i in (start, start + 3 * part))
    rises = all(a < b for a, b in itertools.pairwise(middle))
    if not rises or middle[3] < RISE * middle[0] or now < 0.9 * before:
        return ""
    return (f"the gradient norm rises, from {middle[0]:.3g} to {middle[3]:.3g} (medians of "
            f"quarters), and the loss doesn't fall ({before:.4g}, {now:.4g})")


def judge_clipped(norms: Sequence[float], limit: float) -> str:
    """Gradient norms of the last half of the steps so far, beside --clip.norm (0: off)."""
    if limit <= 0 or len(norms) < 50:
        return ""
    low, median, high = (statistics.quantiles(norms, n=10)[i] for i in (0, 4, 8))
    if median < CLIP_FACTOR * limit:
        return ""
    return (f"the gradient norm is {median:.3g} in the median of the last half (10 %: {low:.3g}, "
            f"90 %: {high:.3g}), {median / limit:.1f} times --clip.norm {limit:g}: nearly each "
            "step is cut")


def judge_batchnorm(samples: int | None) -> str:
    """Samples that a batch norm takes its statistics over."""
    if samples is None or samples >= LEAST_BATCHNORM:
        return ""
    return (f"each BatchNorm takes its statistics over {samples} samples, fewer than "
            f"{LEAST_BATCHNORM}")


def judge_sizes(widths: Iterable[tuple[str, int]], micro_size: int) -> str:
    """Widths of layers by name, and the micro-batch, where they should be multiples of 8."""
    odd = [f"{name} {width}" for name, width in widths if width >= 64 and width % 8]
    if micro_size > 8 and micro_size % 8:
        odd.append(f"--batch.micro-size {micro_size}")
    if not odd:
        return ""
    return ("not multiples of 8, which matrix units compute slowly: " + ", ".join(odd[:3])
            + (f" and {len(odd) - 3} more" if len(odd) > 3 else ""))


def judge_memory(peak: int, total: int, micro_size: int, per_rank: int) -> str:
    """Bytes of device memory used at most, and in all; samples a micro-batch, a rank and step."""
    if micro_size >= per_rank or peak > MEMORY_SHARE * total:
        return ""
    return (f"{peak / 2**30:.1f} of {total / 2**30:.0f} GiB of the device are used at most, and a "
            f"rank's {per_rank} samples a step are taken {micro_size} at a time")


def judge_dead(looks: Sequence[Sequence[str]]) -> str:
    """Names of the parameters whose gradient was exactly zero, at each look, the newest last."""
    if len(looks) < DEAD_LOOKS:
        return ""
    dead = [name for name in looks[-1]
            if all(name in look for look in looks[-DEAD_LOOKS:])]
    if not dead:
        return ""
    return (f"the gradient of {', '.join(dead[:3])}{', …' if len(dead) > 3 else ''} was exactly "
            f"zero at {DEAD_LOOKS} looks in a row")


def judge_easy_validation(
    line: Mapping[str, Any], losses: Sequence[float], accuracies: Sequence[float]
) -> str:
    """A validation of the first epoch, and the newest training steps before it."""
    if len(losses) < 8 or line["val_loss"] is None:
        return ""
    if len(accuracies) >= 8 and line.get("val_accuracy") is not None:
        train, shown = statistics.fmean(accuracies), line["val_accuracy"]
        if 1 - shown > 0.5 * (1 - train) or shown - train < 0.1:
            return ""
        return (f"in the first epoch validation has an accuracy of {shown:.3f}, and the training "
                f"steps before it {train:.3f}")
    usual, seen = statistics.median(losses), line["val_loss"]
    if usual <= 0 or seen > 0.5 * usual:
        return ""
    return (f"in the first epoch validation has a loss of {seen:.4g}, and the training steps "
            f"before it {usual:.4g}")


def judge_overfitting(validations: Sequence[tuple[int, float, float]]) -> str:
    """(step, training loss, validation loss) of each validation."""
    if len(validations) < 4:
        return ""
    best = min(range(len(validations)), key=lambda i: validations[i][2])
    (at, train_then, then), (_, train, now) = validations[best], validations[-1]
    low = min(loss for _, _, loss in validations[-3:])
    least = then + 0.1 * max(abs(then), validations[0][2] - then)
    if len(validations) - 1 - best < 3 or low < least or train >= train_then:
        return ""
    return (f"validation has been best at step {at} (loss {then:.4g}, now {now:.4g}), and the "
            f"training loss falls on ({train_then:.4g}, {train:.4g})")


def judge_rate(rates: Sequence[float]) -> str:
    """Learning rates of the first half of a run, or more of it."""
    if len(rates) < 50 or min(rates) != max(rates):
        return ""
    return f"the learning rate has been {rates[0]:.3g} at each step: it neither rises nor falls"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the judges need to know of the run.

    Args:
        epoch: steps in an epoch; total: in the run.
        expected_loss: of a model that knows nothing yet. None: not known, so the classes of the
            table of a validation tell it; 0: not to be judged.
        zero_gradients: the parameters whose gradient is exactly zero now (waits for the device).
        memory: bytes of device memory used at most, and in all; None where there is none.
        per_rank: samples of a global batch on each rank.
    """

    total: int
    epoch: int
    clip_norm: float
    micro_size: int
    per_rank: int
    expected_loss: float | None = None
    zero_gradients: Callable[[], list[str]] = list
    memory: Callable[[], tuple[int, int] | None] = lambda: None


class Hints:
    """Listens to the run's lines (it is a `Sink`), and gives the hints.

    Args:
        off: names of hints that aren't wanted.
        said: those that have been given in this run.
        lines: of metrics.jsonl so far.
    """

    def __init__(self, log: Log, facts: Facts, *, off: Iterable[str] = (),
                 said: Iterable[str] = (), lines: Iterable[dict[str, Any]] = ()) -> None:
        self._log, self._facts, self._done = log, facts, {*off, *said}
        self._every = max(50, facts.total // LOOKS)
        self._stride = 1
        self._points: list[tuple[int, float, float, float, float | None]] = []
        self._validations: list[tuple[int, float, float]] = []
        self._looks: list[list[str]] = []
        self._first: float | None = None
        for line in lines:
            (self._note_validation if "val_loss" in line else self._note)(line)

    def give(self, name: str, why: str) -> None:
        """Give a hint, unless there is no evidence, it isn't wanted, or has been given."""
        if not why or name in self._done or "all" in self._done:
            return
        self._done.add(name)
        self._log.event("hint", hint=name, why=why)
        self._log.info(f"hint: {why} (docs/hints.md#{name}; --log.hints-off {name})")

    def step(self, line: dict[str, Any], timing: dict[str, float]) -> None:
        if not timing:
            return  # made by an earlier attempt; among `lines`
        if not line["step"] % self._stride:
            self._note(line)
        if not line["step"] % self._every:
            self._guarded(self._judge, line["step"])

    def validation(self, line: dict[str, Any]) -> None:
        if not self._validations or line["step"] > self._validations[-1][0]:
            self._note_validation(line)
            self._guarded(self._judge_validation, line)

    def finish(self, settings: Mapping[str, Any], figures: Mapping[str, float], step: int) -> None:
        self._guarded(self._judge, step)

    def close(self) -> None:
        pass

    def _note(self, line: dict[str, Any]) -> None:
        step, loss, norm = line["step"], line["loss"], line["grad_norm"]
        if step % self._stride or loss is None or norm is None:
            return
        if step == 1:
            self._first = loss
        self._points.append((step, loss, norm, line["lr"], line.get("accuracy")))
        if len(self._points) >= MOST_POINTS:
            self._stride *= 2
            self._points = [p for p in self._points if not p[0] % self._stride]

    def _note_validation(self, line: dict[str, Any]) -> None:
        train, loss = line["train_loss"], line["val_loss"]
        if train is not None and loss is not None:
            self._validations.append((line["step"], train, loss))

    def _guarded(self, judge: Callable[[Any], None], argument: Any) -> None:
        """Nothing depends on a hint, so none may end a run."""
        if "all" in self._done:
            return
        try:
            judge(argument)
        except Exception as error:
            self._done.add("all")
            self._log.warning(f"no more hints: {type(error).__name__}: {error}")

    def _judge(self, step: int) -> None:
        facts, points = self._facts, self._points
        losses, norms, rates = [p[1] for p in points], [p[2] for p in points], [
            p[3] for p in points]
        self._judge_first(None)
        if step >= max(200, facts.total // 10):
            self.give("flat-loss", judge_flat_loss(losses, self._first))
        if step >= max(100, facts.total // 5):
            self.give("clipped-steps", judge_clipped(norms[len(norms) // 2 :], facts.clip_norm))
            self.give("rising-norm", judge_rising_norm(norms, losses))
        if step >= facts.total // 2:
            self.give("constant-rate", judge_rate(rates))
        if "idle-memory" not in self._done and (memory := facts.memory()) is not None:
            self.give("idle-memory", judge_memory(*memory, facts.micro_size, facts.per_rank))
        if "dead-gradient" not in self._done:
            self._looks = [*self._looks, facts.zero_gradients()][-DEAD_LOOKS:]
            self.give("dead-gradient", judge_dead(self._looks))

    def _judge_validation(self, line: dict[str, Any]) -> None:
        table = line.get("val_table")
        self._judge_first(len(table) if table is not None and is_matrix(table) else None)
        if line["step"] <= self._facts.epoch:
            recent = self._points[-max(8, len(self._points) // 4) :]
            self.give("easy-validation", judge_easy_validation(
                line, [p[1] for p in recent], [p[4] for p in recent if p[4] is not None]))
        self.give("overfitting", judge_overfitting(self._validations))

    def _judge_first(self, classes: int | None) -> None:
        expected = self._facts.expected_loss
        if expected is None and classes is not None:
            expected = math.log(classes)
        if self._first is not None and expected:
            self.give("first-loss", judge_first_loss(self._first, expected))
