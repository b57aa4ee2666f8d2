"""Detect wrong combinations of a model's output, a target and a loss, and explain them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import ConfigError

_SHAPE_ONLY = frozenset((
    "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute",
    "Transpose", "T", "ToCopy", "Clone", "Alias", "Slice", "Select", "Expand",
))  # fmt: skip
"""Autograd nodes that only move or cast values."""

_ENOUGH = 32
"""Number of values from which "all between 0 and 1" is taken as a sigmoid: by chance 1 in 2^32."""


def look_classes(
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


def look_binary(name: str, output: Tensor, target: Tensor) -> None:
    """Raise ConfigError unless these are logits with targets from 0 to 1 of the same shape."""
    refuse_activated(name, output, ("Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid"))
    same_shape(name, output, target)
    if not target.is_floating_point():
        raise ConfigError(f"{name}: the target is {target.dtype}; torch needs floats from 0 to 1: "
                          "target.float().")
    low, high = float(target.min()), float(target.max())
    if not (low >= 0 and high <= 1):
        raise ConfigError(f"{name}: targets range from {low:g} to {high:g}; use 0 to 1. For class "
                          "numbers use cross-entropy; convert -1 and 1 by (target + 1) / 2.")


def same_shape(name: str, output: Tensor, target: Tensor) -> None:
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
