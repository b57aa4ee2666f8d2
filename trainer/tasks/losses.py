"""Losses by name: torch's losses, as a sum over the micro-batch and the count of its mean.

A loss is called with the model's output and the target and returns `(total, count)`, the first two
fields of an `Outcome`. `total / count`, summed over all ranks and micro-batches, equals torch's
loss of the same name for the whole batch with `reduction="mean"`. The first non-empty batch is
checked: a wrong combination of output and target that torch would accept silently, or reject
without an explanation, raises a `ConfigError` that says what to change.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.tasks import pairing

Pair = tuple[Tensor, Tensor | float]


@dataclass(frozen=True)
class Loss:
    """Base class: records whether the first non-empty batch has been checked."""

    _checked: list[None] = field(
        default_factory=list, init=False, repr=False, compare=False, kw_only=True)

    def _first(self, output: Tensor) -> bool:
        """Whether this is the first non-empty batch."""
        if self._checked or not output.numel():
            return False
        self._checked.append(None)
        return True


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """`nn.CrossEntropyLoss`: logits NxCx… with class numbers Nx… (or probabilities NxCx…).

    Args:
        weight: one weight per class (see `balanced`); as in torch, the mean is taken over the
            weights of the targets.
        label_smoothing: share of the target that is spread over all classes.
        ignore_index: targets of this number are ignored; None: no target is ignored.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; use 0 to 1.")

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.look_classes(output, target, self.weight, self.ignore_index)
        weight = _constant(self.weight, output)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        total = nn.CrossEntropyLoss(weight, reduction="sum", ignore_index=ignored,
                                    label_smoothing=self.label_smoothing)(output, target)
        if target.is_floating_point():
            return total, output.numel() // output.shape[1]
        if self.ignore_index is None and weight is None:
            return total, target.numel()
        counted = target != ignored
        if weight is None:
            return total, counted.sum()
        return total, weight[target.where(counted, 0)].where(counted, 0).sum()


@dataclass(frozen=True)
class BCE(Loss):
    """`nn.BCEWithLogitsLoss`: logits with targets from 0 to 1 of the same shape. Each logit is an
    independent binary label.

    Args:
        pos_weight: one weight of positive targets per label (see `balanced_positive`).
    """

    pos_weight: tuple[float, ...] | None = None

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.look_binary("bce", output, target)
        weight = _constant(self.pos_weight, output)
        if weight is not None and output.dim() > 2:
            weight = weight.reshape(-1, *[1] * (output.dim() - 2))  # along the channels
        total = nn.BCEWithLogitsLoss(pos_weight=weight, reduction="sum")(output, target)
        return total, output.numel()


@dataclass(frozen=True)
class MSE(Loss):
    """`nn.MSELoss`: output and target of the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.same_shape("mse", output, target)
        return nn.MSELoss(reduction="sum")(output, target.to(output.dtype)), output.numel()


@dataclass(frozen=True)
class Huber(Loss):
    """`nn.HuberLoss`: quadratic up to `delta`, linear beyond.

    Args:
        delta: in units of the target.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ConfigError(f"delta is {self.delta}; use more than 0.")

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.same_shape("huber", output, target)
        loss = nn.HuberLoss(reduction="sum", delta=self.delta)
        return loss(output, target.to(output.dtype)), output.numel()


@dataclass(frozen=True)
class MarginRanking(Loss):
    """`nn.MarginRankingLoss`: called with two scores and their order: 1 if the first should be
    higher, -1 if the second should.

    Args:
        margin: required difference of the scores.
    """

    margin: float = 0.0

    def __call__(self, first: Tensor, second: Tensor, order: Tensor) -> Pair:
        if self._first(first):
            for other in (second, order):
                pairing.same_shape("margin-ranking", first, other)
            if not bool((order.abs() == 1).all()):
                raise ConfigError("margin-ranking: the order has values other than 1 (the first "
                                  "should be higher) and -1; convert 0 and 1 by 2 * order - 1.")
        total = nn.MarginRankingLoss(margin=self.margin, reduction="sum")(first, second, order)
        return total, first.numel()


@dataclass(frozen=True)
class KL(Loss):
    """`nn.KLDivLoss` from a teacher's logits to a student's, both NxC, for distillation.

    Logits are divided by the temperature; the loss is multiplied by its square, so that the size of
    the gradients doesn't depend on it (Hinton, Vinyals, Dean 2015).

    Args:
        temperature: divisor of both logits.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}; use more than 0.")

    def __call__(self, output: Tensor, teacher: Tensor) -> Pair:
        if self._first(output):
            pairing.same_shape("kl", output, teacher)
            for logits in (output, teacher):
                pairing.refuse_activated("kl", logits, ("Softmax", "Sigmoid"), softmax_dim=1)
            if teacher.requires_grad:
                raise ConfigError("kl: the teacher's logits require gradients, so the teacher "
                                  "would be trained too; compute them under torch.no_grad().")
        student = (output / self.temperature).log_softmax(1)
        wanted = (teacher / self.temperature).log_softmax(1)
        total = nn.KLDivLoss(reduction="sum", log_target=True)(student, wanted)
        return total * self.temperature**2, len(output)


@dataclass(frozen=True)
class DiceBCE(Loss):
    """Weighted sum of 1 - Dice and mean `nn.BCEWithLogitsLoss` per mask: logits and masks NxCxHxW.

    Dice is computed separately for each sample's mask, so the loss is a sum over samples:
    2·|P∩T| / (|P|+|T|) with probabilities for P; `smooth` is added to numerator and denominator
    (Milletari, Navab, Ahmadi 2016).

    Args:
        smooth: pixels; makes the Dice of two empty masks 1.
        dice: weight of Dice in the loss; BCE has the rest.
    """

    smooth: float = 1.0
    dice: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.dice <= 1:
            raise ConfigError(f"dice is {self.dice}; use 0 to 1.")

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.look_binary("dice+bce", output, target)
        pixels = tuple(range(2, output.dim()))
        predicted = output.sigmoid()
        intersection = (predicted * target).sum(pixels)
        sizes = predicted.sum(pixels) + target.sum(pixels)
        missed = 1 - (2 * intersection + self.smooth) / (sizes + self.smooth)
        cross = nn.BCEWithLogitsLoss(reduction="none")(output, target).mean(pixels)
        masks = self.dice * missed + (1 - self.dice) * cross
        return masks.sum() / output.shape[1], len(output)


LOSSES: dict[str, type[Loss]] = {
    "cross-entropy": CrossEntropy, "bce": BCE, "mse": MSE, "huber": Huber,
    "margin-ranking": MarginRanking, "kl": KL, "dice+bce": DiceBCE,
}  # fmt: skip
"""Name → loss class; its fields are the options."""


@functools.cache  # so that the first batch is checked only once
def named(name: str, **options: Any) -> Any:
    """The loss of a name and its options; the same object for the same arguments.

    Raises:
        ConfigError: unknown loss, unknown option, or invalid value.
    """
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(LOSSES)}."
        raise ConfigError(f"loss {name!r}: there is no loss of this name; {hint}")
    known = [f.name for f in fields(LOSSES[name]) if f.init]
    for option in options:
        if option not in known:
            raise ConfigError(f"loss {name}: it has no option {option!r}; "
                              + (f"its options are {', '.join(known)}." if known else
                                 "it has no options."))
    return LOSSES[name](**options)


def balanced(counts: Sequence[int]) -> tuple[float, ...]:
    """Class weights inversely proportional to the class counts: n / (classes · n of the class).

    All classes that occur then have the same total weight; a class without samples has weight 0.
    """
    total = sum(counts)
    present = sum(count > 0 for count in counts)
    return tuple(total / (present * count) if count else 0.0 for count in counts)


def balanced_positive(positives: Sequence[int], samples: int) -> tuple[float, ...]:
    """`pos_weight` of BCE that gives positives and negatives of each label the same total weight;
    1 for a label without positives."""
    return tuple((samples - count) / count if count else 1.0 for count in positives)


@functools.lru_cache(maxsize=64)  # a copy to the device would synchronise with it in each step
def _on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)


def _constant(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    return None if values is None else _on_device(tuple(values), like.device, like.dtype)
