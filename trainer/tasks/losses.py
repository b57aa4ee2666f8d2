"""Losses by name: torch's losses, as a sum over the micro-batch and the count of its mean.

A loss is called with the model's output and the target and returns `(total, count)`, the first two
fields of an `Outcome`. `total / count`, summed over all ranks and micro-batches, equals torch's
loss of the same name for the whole batch with `reduction="mean"`. In the first batch of a run, each
loss checks for combinations of output and target that torch would accept although they are wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.task import Outcome, is_first_batch
from trainer.telemetry.classification import confusion

SumAndCount = tuple[Tensor, Tensor | float]

_ENOUGH = 32
"""Number of values from which "all between 0 and 1" is taken as a sigmoid: by chance 1 in 2^32."""


def check_class_targets(output: Tensor, target: Tensor, ignore_index: int | None) -> None:
    refuse_activated("cross-entropy", output)
    classes = output.shape[1] if output.dim() > 1 else 0
    if classes < 2:
        raise ConfigError(f"cross-entropy: the output has shape {tuple(output.shape)}; return NxC "
                          "logits, one per class. For one logit per sample use the loss bce.")
    if target.is_floating_point() or target.shape == output.shape:
        if ignore_index is not None:
            raise ConfigError("cross-entropy: ignore_index has no effect on targets that are class "
                              "probabilities; remove it, or give class numbers.")
        return
    counted = target if ignore_index is None else target[target != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ConfigError(f"cross-entropy: targets range from {int(counted.min())} to "
                          f"{int(counted.max())}, but {classes} logits stand for the classes 0 "
                          f"to {classes - 1}; give the model more outputs, or exclude a target "
                          "number by ignore_index.")


def check_binary_targets(name: str, output: Tensor, target: Tensor) -> None:
    refuse_activated(name, output)
    low, high = float(target.min()), float(target.max())
    if not (low >= 0 and high <= 1):
        raise ConfigError(f"{name}: targets range from {low:g} to {high:g}; use 0 to 1. For class "
                          "numbers use cross-entropy; convert -1 and 1 by (target + 1) / 2.")


def check_same_shape(name: str, output: Tensor, target: Tensor) -> None:
    """Check that the shapes are equal: torch would broadcast them."""
    if output.shape != target.shape:
        raise ConfigError(f"{name}: the output has shape {tuple(output.shape)} and the target "
                          f"{tuple(target.shape)}; torch would broadcast them. Make them equal, "
                          "for example by target.unsqueeze(1) or output.squeeze(1).")


def refuse_activated(name: str, output: Tensor) -> None:
    """Check that the output is logits and not the result of a softmax or sigmoid."""
    values = output.detach().float()
    if not bool(((values >= 0) & (values <= 1)).all()):
        return
    operation = _last_operation(output)
    if output.dim() > 1 and output.shape[1] > 1 and bool(
            ((values.sum(1) - 1).abs() < 1e-3).all()):
        made = "softmax"
    elif operation.startswith("Sigmoid") or (
            # A compiled function doesn't show its operations.
            operation.startswith(("CompiledFunction", "none")) and values.numel() >= _ENOUGH):
        made = "sigmoid"
    else:
        return
    raise ConfigError(f"{name}: the model's output went through a {made}, and the loss applies it "
                      f"too; return the logits (remove the {made} from the model, and apply it "
                      "where you need probabilities).")


def _last_operation(output: Tensor) -> str:
    """Autograd's name of the operation that computed a tensor. Operations with one input are passed
    over: they may be casts and views."""
    node = output.grad_fn
    while node is not None and len(node.next_functions) == 1 and (
            not node.name().startswith(("Sigmoid", "CompiledFunction"))):
        node = node.next_functions[0][0]
    return "none" if node is None else node.name()


def _is_checked(output: Tensor) -> bool:
    return is_first_batch() and output.numel() > 0


def class_last(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits NxCx… and class numbers Nx… as (N…)xC and (N…), with the same cross-entropy: for more
    than one axis of positions, CUDA has no deterministic kernel."""
    if output.dim() < 3 or target.is_floating_point():
        return output, target
    return output.movedim(1, -1).flatten(0, -2), target.flatten()


@dataclass(frozen=True)
class CrossEntropy:
    """`nn.CrossEntropyLoss`: logits NxCx… with class numbers Nx… (or probabilities NxCx…). With
    one `weight` per class (see `balanced`) the mean is taken over the weights of the targets."""

    weight: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore_index: int | None = None

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_class_targets(output, target, self.ignore_index)
        weight = _constant(self.weight, output)
        ignored = -100 if self.ignore_index is None else self.ignore_index
        loss = nn.CrossEntropyLoss(weight, reduction="sum", ignore_index=ignored,
                                   label_smoothing=self.label_smoothing)
        total = loss(*(class_last(output, target) if output.is_cuda else (output, target)))
        if target.is_floating_point():
            return total, output.numel() // output.shape[1]
        if self.ignore_index is None and weight is None:
            return total, target.numel()
        counted = target != ignored
        if weight is None:
            return total, counted.sum()
        return total, weight[target.where(counted, 0)].where(counted, 0).sum()


@dataclass(frozen=True)
class BCE:
    """`nn.BCEWithLogitsLoss`: logits of independent labels with targets from 0 to 1 of the same
    shape; one weight of positive targets per label (see `balanced_positive`)."""

    pos_weight: tuple[float, ...] | None = None

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_binary_targets("bce", output, target)
        weight = _constant(self.pos_weight, output)
        if weight is not None and output.dim() > 2:
            weight = weight.reshape(-1, *[1] * (output.dim() - 2))  # along the channels
        total = nn.BCEWithLogitsLoss(pos_weight=weight, reduction="sum")(output, target)
        return total, output.numel()


@dataclass(frozen=True)
class MSE:
    """`nn.MSELoss`: output and target of the same shape."""

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_same_shape("mse", output, target)
        return nn.MSELoss(reduction="sum")(output, target.to(output.dtype)), output.numel()


@dataclass(frozen=True)
class Huber:
    """`nn.HuberLoss`: quadratic up to `delta` (in units of the target), linear beyond."""

    delta: float = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_same_shape("huber", output, target)
        loss = nn.HuberLoss(reduction="sum", delta=self.delta)
        return loss(output, target.to(output.dtype)), output.numel()


@dataclass(frozen=True)
class MarginRanking:
    """`nn.MarginRankingLoss`: called with two scores and their order: 1 if the first should be
    higher by `margin`, -1 if the second should."""

    margin: float = 0.0

    def __call__(self, first: Tensor, second: Tensor, order: Tensor) -> SumAndCount:
        if _is_checked(first) and not bool((order.abs() == 1).all()):
            raise ConfigError("margin-ranking: the order has values other than 1 (the first "
                              "should be higher) and -1; convert 0 and 1 by 2 * order - 1.")
        total = nn.MarginRankingLoss(margin=self.margin, reduction="sum")(first, second, order)
        return total, first.numel()


@dataclass(frozen=True)
class KL:
    """`nn.KLDivLoss` from a teacher's logits to a student's, both NxC, for distillation. Logits are
    divided by the temperature; the loss is multiplied by its square, so that the size of the
    gradients doesn't depend on it (Hinton, Vinyals, Dean 2015)."""

    temperature: float = 1.0

    def __call__(self, output: Tensor, teacher: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_same_shape("kl", output, teacher)
            refuse_activated("kl", output)
            refuse_activated("kl", teacher)
            if teacher.requires_grad:
                raise ConfigError("kl: the teacher's logits require gradients, so the teacher "
                                  "would be trained too; compute them under torch.no_grad().")
        student = (output / self.temperature).log_softmax(1)
        wanted = (teacher / self.temperature).log_softmax(1)
        total = nn.KLDivLoss(reduction="sum", log_target=True)(student, wanted)
        return total * self.temperature**2, len(output)


@dataclass(frozen=True)
class DiceBCE:
    """Sum of 1 - Dice, with weight `dice`, and of the mean `nn.BCEWithLogitsLoss` of a mask, with
    the remaining weight: logits and masks NxCxHxW.

    Dice is computed for each mask alone, so the loss is a sum over samples: 2·|P∩T| / (|P|+|T|)
    with probabilities for P (Milletari, Navab, Ahmadi 2016). `smooth` pixels are added to numerator
    and denominator, so that it is 1 for two empty masks.
    """

    smooth: float = 1.0
    dice: float = 0.5

    def __call__(self, output: Tensor, target: Tensor) -> SumAndCount:
        if _is_checked(output):
            check_binary_targets("dice+bce", output, target)
        pixels = tuple(range(2, output.dim()))
        predicted = output.sigmoid()
        intersection = (predicted * target).sum(pixels)
        sizes = predicted.sum(pixels) + target.sum(pixels)
        missed = 1 - (2 * intersection + self.smooth) / (sizes + self.smooth)
        cross = nn.BCEWithLogitsLoss(reduction="none")(output, target).mean(pixels)
        masks = self.dice * missed + (1 - self.dice) * cross
        return masks.sum() / output.shape[1], len(output)


LOSSES: dict[str, type[Any]] = {
    "cross-entropy": CrossEntropy, "bce": BCE, "mse": MSE, "huber": Huber,
    "margin-ranking": MarginRanking, "kl": KL, "dice+bce": DiceBCE}
"""Name → loss class; its fields are the options."""


def named(name: str, **options: Any) -> Any:
    """The loss of a name and its options."""
    if name not in LOSSES:
        raise ConfigError(f"loss {name!r}: there is no loss of this name; use one of "
                          f"{', '.join(LOSSES)}.")
    try:
        return LOSSES[name](**options)
    except TypeError as error:
        known = [f.name for f in dataclasses.fields(LOSSES[name]) if f.init]
        raise ConfigError(f"loss {name!r}: {error}; its options are "
                          f"{', '.join(known) or 'none'}.") from error


def classification(
    logits: Tensor, labels: Tensor, *, training: bool, label_smoothing: float = 0.0,
    weight: tuple[float, ...] | None = None,
) -> Outcome:
    """Cross-entropy (smoothed in training) and accuracy, and in evaluation the confusion."""
    loss = named("cross-entropy", weight=weight,
                 label_smoothing=label_smoothing if training else 0.0)
    found = logits.detach().argmax(1)
    table = None if training else confusion(found, labels, logits.shape[1])
    accuracy = (found == labels).sum(), len(labels)
    total, count = loss(logits, labels)
    return Outcome(total, count, {"accuracy": accuracy}, table)


def balanced(counts: Sequence[int]) -> tuple[float, ...]:
    """Class weights that give all classes the same total weight: n / (classes · n of the class)."""
    total = sum(counts)
    present = sum(count > 0 for count in counts)
    return tuple(total / (present * count) if count else 0.0 for count in counts)


def balanced_positive(positives: Sequence[int], samples: int) -> tuple[float, ...]:
    """`pos_weight` of BCE that gives positives and negatives of a label the same total weight."""
    return tuple((samples - count) / count if count else 1.0 for count in positives)


@functools.lru_cache(maxsize=64)  # a copy to the device would synchronise with it in each step
def _on_device(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)


def _constant(values: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    return None if values is None else _on_device(tuple(values), like.device, like.dtype)
