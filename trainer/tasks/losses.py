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
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError

_SHAPE_ONLY = frozenset((
    "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute",
    "Transpose", "T", "ToCopy", "Clone", "Alias", "Slice", "Select", "Expand",
))  # fmt: skip
"""Autograd nodes that only move or cast values."""

_ENOUGH = 32
"""Number of values from which "all between 0 and 1" is taken as a sigmoid: by chance 1 in 2^32."""


def check_class_targets(
    output: Tensor, target: Tensor, weight: Sequence[float] | None, ignore_index: int | None
) -> None:
    """Raise ConfigError unless these are logits NxCx… with class numbers Nx… or probabilities."""
    name = "cross-entropy"
    refuse_activated(name, output, ("Softmax", "Sigmoid"), softmax_dim=1)
    shape, classes = tuple(output.shape), output.shape[1] if output.dim() > 1 else 0
    wanted = (output.shape[0], *output.shape[2:])
    if classes < 2:
        raise ConfigError(f"{name}: the output has shape {shape}; return NxC logits, one per "
                          "class. For one logit per sample use the loss bce.")
    if target.is_floating_point():
        if target.shape != output.shape:
            raise ConfigError(
                f"{name}: the target is {target.dtype} of shape {tuple(target.shape)}; use class "
                f"numbers, int64 of shape {wanted}: target.long(). (Class probabilities must have "
                f"the output's shape {shape}; for regression use the loss mse or huber.)")
        return
    if target.shape == output.shape and target.shape != wanted:
        raise ConfigError(f"{name}: the target is one-hot, {target.dtype} of shape {shape}; "
                          f"use class numbers of shape {wanted}: target.argmax(1).")
    if target.shape != wanted:
        raise ConfigError(f"{name}: the output has shape {shape} and the target "
                          f"{tuple(target.shape)}; use class numbers of shape {wanted}"
                          + (": target.squeeze(1)." if target.dim() == 2 and len(wanted) == 1
                             else "."))
    if target.dtype != torch.int64:
        raise ConfigError(f"{name}: the target is {target.dtype}; torch needs class numbers "
                          "as int64: target.long().")
    if weight is not None and len(weight) != classes:
        raise ConfigError(f"{name}: there are {len(weight)} class weights and {classes} logits; "
                          "give one weight per class.")
    counted = target if ignore_index is None else target[target != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ConfigError(f"{name}: targets range from {int(counted.min())} to "
                          f"{int(counted.max())}, but {classes} logits stand for the classes 0 "
                          f"to {classes - 1}; give the model more outputs, or exclude a target "
                          "number by ignore_index.")


def check_binary_targets(name: str, output: Tensor, target: Tensor) -> None:
    """Raise ConfigError unless these are logits with targets from 0 to 1 of the same shape."""
    refuse_activated(name, output, ("Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid"))
    check_same_shape(name, output, target)
    if not target.is_floating_point():
        raise ConfigError(f"{name}: the target is {target.dtype}; torch needs floats from 0 to 1: "
                          "target.float().")
    low, high = float(target.min()), float(target.max())
    if not (low >= 0 and high <= 1):
        raise ConfigError(f"{name}: targets range from {low:g} to {high:g}; use 0 to 1. For class "
                          "numbers use cross-entropy; convert -1 and 1 by (target + 1) / 2.")


def check_same_shape(name: str, output: Tensor, target: Tensor) -> None:
    """Raise ConfigError if the shapes differ: torch would broadcast them."""
    if output.shape != target.shape:
        one, other = tuple(output.shape), tuple(target.shape)
        hint = ("target.unsqueeze(1), or output.squeeze(1)" if (*other, 1) == one else
                "output.unsqueeze(1), or target.squeeze(1)" if (*one, 1) == other else
                "equal shapes")
        raise ConfigError(f"{name}: the output has shape {one} and the target {other}; torch would "
                          f"broadcast them. Use {hint}.")


def refuse_activated(
    name: str, output: Tensor, operations: Sequence[str], softmax_dim: int | None = None
) -> None:
    """Raise ConfigError if the output isn't logits but the result of one of `operations`."""
    made = _made_by(output)
    values = output.detach().float()
    if made not in operations:
        made = ""
        inside = bool(((values > 0) & (values < 1)).all())
        if softmax_dim is not None and output.dim() > softmax_dim and output.shape[softmax_dim] > 1:
            sums = values.sum(softmax_dim)
            if bool((values >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
                made = "Softmax"
        elif inside and values.numel() >= _ENOUGH and _compiled(output):
            made = "Sigmoid"
    if made:
        raise ConfigError(f"{name}: the model's output went through a {made.lower()}, and the loss "
                          f"applies it too; return the logits (remove the {made.lower()} from the "
                          "model, and apply it where you need probabilities).")


def _made_by(output: Tensor) -> str:
    """Name of the autograd node that computed a tensor; "" if unknown."""
    node = output.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", type(node).__name__)
        if name not in _SHAPE_ONLY:
            return name
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return ""


def _compiled(output: Tensor) -> bool:
    """Whether the autograd graph doesn't show which operation computed a tensor."""
    return output.grad_fn is None or _made_by(output).startswith("CompiledFunction")


SumAndCount = tuple[Tensor, Tensor | float]


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

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if self._first(output):
            check_class_targets(output, target, self.weight, self.ignore_index)
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

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if self._first(output):
            check_binary_targets("bce", output, target)
        weight = _constant(self.pos_weight, output)
        if weight is not None and output.dim() > 2:
            weight = weight.reshape(-1, *[1] * (output.dim() - 2))  # along the channels
        total = nn.BCEWithLogitsLoss(pos_weight=weight, reduction="sum")(output, target)
        return total, output.numel()


@dataclass(frozen=True)
class MSE(Loss):
    """`nn.MSELoss`: output and target of the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if self._first(output):
            check_same_shape("mse", output, target)
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

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if self._first(output):
            check_same_shape("huber", output, target)
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

    def __call__(self, first: Tensor, second: Tensor, order: Tensor) -> SumAndCount:
        if self._first(first):
            for other in (second, order):
                check_same_shape("margin-ranking", first, other)
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

    def __call__(self, output: Tensor, teacher: Tensor) -> SumAndCount:
        if self._first(output):
            check_same_shape("kl", output, teacher)
            for logits in (output, teacher):
                refuse_activated("kl", logits, ("Softmax", "Sigmoid"), softmax_dim=1)
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

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if self._first(output):
            check_binary_targets("dice+bce", output, target)
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
