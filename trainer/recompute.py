"""Activation checkpointing: blocks whose activations the backward computes anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError


def recompute(model: nn.Module, every: int) -> list[str]:
    """Let every n-th block (0: none) keep nothing for the backward but its input.

    The same bits as without: generators are put back for the second forward, and buffers, such
    as a batch norm's statistics, don't see it. Names stay plain (torch's `checkpoint_wrapper`
    adds one of its own).

    Returns:
        The blocks' names.

    Raises:
        ConfigError: the model has no blocks.
    """
    if not every:
        return []
    found = blocks(model)
    if not found:
        raise ConfigError(f"--precision.recompute-every {every}: the model has no blocks, several "
                          "modules of layers in one nn.Sequential or nn.ModuleList; use 0.")
    chosen = dict(list(found.items())[every - 1 :: every])
    for module in chosen.values():
        module.forward = partial(_forward, module, module.forward)
    return list(chosen)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name → block: of several modules with layers of their own in one nn.Sequential or
    nn.ModuleList; the innermost such, so of stages of blocks the blocks."""
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, path: str) -> None:
        layered = [child for child in module.children() if any(child.children())]
        listed = isinstance(module, nn.Sequential | nn.ModuleList) and len(layered) > 1
        for name, child in module.named_children():
            before = len(found)
            look(child, f"{path}{name}.")
            inner = len(found) > before or isinstance(child, nn.ModuleList | nn.ModuleDict)
            if listed and child in layered and not inner:
                found[path + name] = child

    look(model, "")
    return found


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = partial(_contexts, module)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """Around the forward, and around the one in the backward."""
    return contextlib.nullcontext(), _untouched(module)


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """The module's buffers afterwards are what they were before."""
    kept = [(inner._buffers, name, buffer, buffer.detach().clone()) for inner in module.modules()
            for name, buffer in inner._buffers.items() if buffer is not None]
    try:
        yield
    finally:
        for owner, name, buffer, value in kept:
            owner[name] = buffer  # the forward may have assigned another
            buffer.data.copy_(value)  # what the graph keeps isn't to count as changed
