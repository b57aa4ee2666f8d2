"""Wrong pairings of a model's output, a target and a loss, recognised and explained."""

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
"""Nodes of the graph that move or cast values and compute none."""

_ENOUGH = 32
"""So many values between 0 and 1, and none else, are no chance: one in 2^32."""


def look_classes(
    output: Tensor, target: Tensor, weight: Sequence[float] | None, ignore_index: int | None
) -> None:
    """Raises: ConfigError: these aren't logits NxCx… with class numbers Nx…, or probabilities."""
    name = "cross-entropy"
    refuse_activated(name, output, ("Softmax", "Sigmoid"), softmax_dim=1)
    shape, classes = tuple(output.shape), output.shape[1] if output.dim() > 1 else 0
    wanted = (output.shape[0], *output.shape[2:])
    if classes < 2:
        raise ConfigError(f"{name}: the output is {shape}; NxC logits are wanted, one a class. "
                          "For one logit a sample use the loss bce.")
    if target.is_floating_point():
        if target.shape != output.shape:
            raise ConfigError(
                f"{name}: the target is {target.dtype} of shape {tuple(target.shape)}; class "
                f"numbers are wanted, int64 of shape {wanted}: target.long(). (Probabilities "
                f"of classes have the output's shape {shape}; for numbers to be predicted use "
                "the loss mse or huber.)")
        return
    if target.shape == output.shape and target.shape != wanted:
        raise ConfigError(f"{name}: the target is one-hot, {target.dtype} of shape {shape}; "
                          f"give class numbers, target.argmax(1), of shape {wanted}.")
    if target.shape != wanted:
        raise ConfigError(f"{name}: the output is {shape} and the target "
                          f"{tuple(target.shape)}; class numbers of shape {wanted} are wanted"
                          + (": target.squeeze(1)." if target.dim() == 2 and len(wanted) == 1
                             else "."))
    if target.dtype != torch.int64:
        raise ConfigError(f"{name}: the target is {target.dtype}; torch wants class numbers "
                          "in int64: target.long().")
    if weight is not None and len(weight) != classes:
        raise ConfigError(f"{name}: {len(weight)} class weights and {classes} logits; "
                          "give one a class.")
    counted = target if ignore_index is None else target[target != ignore_index]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise ConfigError(f"{name}: targets lie from {int(counted.min())} to "
                          f"{int(counted.max())}, and {classes} logits are for the classes 0 "
                          f"to {classes - 1}; give the model more outputs, or say which number "
                          "isn't counted with ignore_index.")


def look_binary(name: str, output: Tensor, target: Tensor) -> None:
    """Raises: ConfigError: these aren't logits with targets 0 to 1 of the same shape."""
    refuse_activated(name, output, ("Sigmoid", "Softmax", "LogSoftmax", "LogSigmoid"))
    same_shape(name, output, target)
    if not target.is_floating_point():
        raise ConfigError(f"{name}: the target is {target.dtype}; torch wants floats from 0 to 1: "
                          "target.float().")
    low, high = float(target.min()), float(target.max())
    if not (low >= 0 and high <= 1):
        raise ConfigError(f"{name}: targets lie from {low:g} to {high:g}; 0 to 1 are wanted. Class "
                          "numbers are for cross-entropy; -1 and 1 become (target + 1) / 2.")


def same_shape(name: str, output: Tensor, target: Tensor) -> None:
    """Raises: ConfigError: the shapes differ, which torch would broadcast."""
    if output.shape != target.shape:
        one, other = tuple(output.shape), tuple(target.shape)
        hint = ("target.unsqueeze(1), or output.squeeze(1)" if (*other, 1) == one else
                "output.unsqueeze(1), or target.squeeze(1)" if (*one, 1) == other else
                "make them equal")
        raise ConfigError(f"{name}: the output is {one} and the target {other}; torch would pair "
                          f"each with each. Use {hint}.")


def refuse_activated(
    name: str, output: Tensor, operations: Sequence[str], softmax_dim: int | None = None
) -> None:
    """Raises: ConfigError: the output isn't logits but went through one of `operations`."""
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
                          f"does that itself; return the logits (leave {made.lower()} out of the "
                          "model, and apply it where you need probabilities).")


def _made_by(output: Tensor) -> str:
    """The operation that computed a tensor, as its graph names it; "" if that isn't known."""
    node = output.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", type(node).__name__)
        if name not in _SHAPE_ONLY:
            return name
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return ""


def _compiled(output: Tensor) -> bool:
    """Whether the graph can't tell what computed a tensor."""
    return output.grad_fn is None or _made_by(output).startswith("CompiledFunction")
