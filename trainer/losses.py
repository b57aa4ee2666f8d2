"""Losses by name: torch's own, each as a sum over the micro-batch and what its mean is taken over.

A loss is called with the model's output and the target and returns `(total, count)`, the first two
members of an `Outcome`: `total / count`, summed over all ranks and micro-batches, is what torch's
loss of the same name gives for the whole batch with `reduction="mean"`. The first batch with a
sample in it is looked at: a pairing that torch would compute without a word, or refuse without an
explanation, is a `ConfigError` that says what to change.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from trainer import pairing
from trainer.errors import ConfigError

Pair = tuple[Tensor, Tensor | float]


@dataclass(frozen=True)
class Loss:
    """What all have in common: the first batch is looked at."""

    _looked: list[None] = field(
        default_factory=list, init=False, repr=False, compare=False, kw_only=True)

    def _first(self, output: Tensor) -> bool:
        """Whether this is the first batch that tells something."""
        if self._looked or not output.numel():
            return False
        self._looked.append(None)
        return True


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """`nn.CrossEntropyLoss`: logits NxCx… with class numbers Nx… (or probabilities NxCx…).

    Args:
        weight: one a class (see `balanced`); the mean is over the weights of the targets, as
            torch's is.
        label_smoothing: share of the target that is spread over all classes.
        ignore_index: targets of this number aren't counted; None: there are none.
    """

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; it lies from 0 to 1.")

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
    """`nn.BCEWithLogitsLoss`: logits with targets 0 to 1 of the same shape; one logit is one yes
    or no, so labels don't exclude each other.

    Args:
        pos_weight: one a label (see `balanced_positive`), how much more a yes weighs.
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
    """`nn.MSELoss`: numbers of any, but the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.same_shape("mse", output, target)
        return nn.MSELoss(reduction="sum")(output, target.to(output.dtype)), output.numel()


@dataclass(frozen=True)
class Huber(Loss):
    """`nn.HuberLoss`: squared up to `delta`, linear beyond.

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
    """`nn.MarginRankingLoss`: called with two scores and their order, 1 where the first is to be
    the higher one and -1 where the second.

    Args:
        margin: by how much.
    """

    margin: float = 0.0

    def __call__(self, first: Tensor, second: Tensor, order: Tensor) -> Pair:
        if self._first(first):
            for other in (second, order):
                pairing.same_shape("margin-ranking", first, other)
            if not bool((order.abs() == 1).all()):
                raise ConfigError("margin-ranking: the order has other values than 1 (the first is "
                                  "to be higher) and -1; from 0 and 1 make 2 * order - 1.")
        total = nn.MarginRankingLoss(margin=self.margin, reduction="sum")(first, second, order)
        return total, first.numel()


@dataclass(frozen=True)
class KL(Loss):
    """`nn.KLDivLoss` from a teacher's logits to a student's, both NxC, softened by a temperature
    and multiplied by its square, so that gradients keep their size (Hinton, Vinyals, Dean 2015).

    Args:
        temperature: what both logits are divided by; 1 leaves them.
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
                raise ConfigError("kl: the teacher's logits have a graph, so it would be trained "
                                  "too; compute them under torch.no_grad().")
        student = (output / self.temperature).log_softmax(1)
        wanted = (teacher / self.temperature).log_softmax(1)
        total = nn.KLDivLoss(reduction="sum", log_target=True)(student, wanted)
        return total * self.temperature**2, len(output)


@dataclass(frozen=True)
class DiceBCE(Loss):
    """1 - Dice of each mask, plus its mean `nn.BCEWithLogitsLoss`: logits and masks NxCxHxW.

    Dice is taken of each sample's mask alone, so that it is a sum over samples: 2·|P∩T| / (|P|+|T|)
    with probabilities for P, each sum raised by `smooth` (Milletari, Navab, Ahmadi 2016).

    Args:
        smooth: pixels; makes the Dice of two empty masks 1.
        dice: share of Dice in the loss; the rest is BCE's.
    """

    smooth: float = 1.0
    dice: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.dice <= 1:
            raise ConfigError(f"dice is {self.dice}; it lies from 0 to 1.")

    def __call__(self, output: Tensor, target: Tensor) -> Pair:
        if self._first(output):
            pairing.look_binary("dice+bce", output, target)
        pixels = tuple(range(2, output.dim()))
        found = output.sigmoid()
        both = (found * target).sum(pixels)
        sizes = found.sum(pixels) + target.sum(pixels)
        missed = 1 - (2 * both + self.smooth) / (sizes + self.smooth)
        cross = nn.BCEWithLogitsLoss(reduction="none")(output, target).mean(pixels)
        masks = self.dice * missed + (1 - self.dice) * cross
        return masks.sum() / output.shape[1], len(output)


LOSSES: dict[str, type[Loss]] = {
    "cross-entropy": CrossEntropy, "bce": BCE, "mse": MSE, "huber": Huber,
    "margin-ranking": MarginRanking, "kl": KL, "dice+bce": DiceBCE,
}  # fmt: skip
"""Name → loss; its fields are its options."""


@functools.cache  # so that the first batch is looked at once
def named(name: str, **options: Any) -> Any:
    """A loss by its name, with its options; the same object for the same ones.

    Raises:
        ConfigError: no such loss, no such option, or a value that doesn't fit.
    """
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(LOSSES)}."
        raise ConfigError(f"loss {name!r}: there is none of this name; {hint}")
    known = [f.name for f in fields(LOSSES[name]) if f.init]
    for option in options:
        if option not in known:
            raise ConfigError(f"loss {name}: it has no option {option!r}; "
                              f"{', '.join(known) or 'it has none'}.")
    return LOSSES[name](**options)


def balanced(counts: Sequence[int]) -> tuple[float, ...]:
    """Class weights by which each class that occurs weighs the same: n / (classes · n of it); 0
    for a class without samples."""
    total = sum(counts)
    present = sum(count > 0 for count in counts)
    return tuple(total / (present * count) if count else 0.0 for count in counts)


def balanced_positive(positives: Sequence[int], samples: int) -> tuple[float, ...]:
    """BCE's pos_weight by which the yeses of each label weigh as much as its noes; 1 where there
    is no yes."""
    return tuple((samples - count) / count if count else 1.0 for count in positives)


@functools.lru_cache(maxsize=64)  # a copy to a device would wait for it in each step
def _on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)


def _constant(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    return None if values is None else _on_device(tuple(values), like.device, like.dtype)
