"""The optimizer: parameter groups by decay, fused AdamW or SGD, or the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import Clip, Optim
from trainer.errors import ConfigError
from trainer.task import load_object


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and kernels decay; biases and norms (fewer than 2 dimensions) don't.
    Frozen parameters are in neither."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build(
    config: Optim, model: nn.Module,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer of the configuration over the model's trainable parameters.

    Args:
        groups: the task's own `parameter_groups`, if it has one.

    Raises:
        ConfigError: nothing to train, or a class that can't be found or called.
    """
    made = groups(model) if groups is not None else parameter_groups(model, config.weight_decay)
    made = [{**g, "params": list(g["params"])} for g in made]
    if not any(g["params"] for g in made):
        raise ConfigError("--task: the model has no trainable parameter; nothing can be learnt.")
    if config.name == "adamw":
        fused = {p.device.type for p in model.parameters()} <= {"cpu", "cuda", "mps"}
        return torch.optim.AdamW(
            made, lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, fused=fused,
        )  # fmt: skip
    if config.name == "sgd":
        return torch.optim.SGD(
            made, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov == "on",
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
    cls = load_object(config.name, flag="--optim.name")
    try:
        return cls(made, lr=config.lr, weight_decay=config.weight_decay)
    except TypeError as error:
        raise ConfigError(f"--optim.name {config.name}: calling it with parameter groups, lr and "
                          f"weight_decay raised {error}.") from error


def clip(parameters: list[Tensor], config: Clip) -> Tensor:
    """Clip the gradients in place, by value where that is set, otherwise by global norm.

    Returns:
        The global L2 norm before clipping, a scalar tensor. A non-finite norm is returned as it
        is and must be looked at; the gradients are then not clipped by it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if config.value > 0:
        torch.nn.utils.clip_grad_value_(parameters, config.value)
    elif config.norm > 0:
        # By a norm of 0 where it isn't finite, which changes nothing: else one NaN would hide in
        # which gradients there were any.
        safe = norm.nan_to_num(0.0, 0.0, 0.0)
        torch.nn.utils.clip_grads_with_norm_(parameters, config.norm, safe)
    return norm
