"""The model's graph, for TensorBoard."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer import rng


def trace(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
    """Trace a model with the inputs that the task's loss passes to it for this batch.

    The model, its mode and the random generators are not changed.

    Returns:
        A GraphDef.

    Raises:
        RuntimeError: the model can't be traced, or the loss doesn't call it as a module.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    seen: list[tuple[Any, ...]] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    training, compiled = model.training, model._compiled_call_impl
    model._compiled_call_impl = None  # compiled code can't be traced
    model.eval()
    try:
        with rng.preserved(), torch.no_grad(), warnings.catch_warnings(action="ignore"):
            loss(model, batch)
            hook.remove()
            if not seen:
                raise RuntimeError("the task's loss doesn't call model(…) with positional inputs")
            definition, _ = graph(model, seen[0])
            return definition
    finally:
        hook.remove()
        model._compiled_call_impl = compiled
        model.train(training)
