"""Activation checkpointing: backward recomputes the activations of selected blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.distributed.stand_in import buffers_preserved
from trainer.errors import ConfigError


def recompute(model: nn.Module, every: int) -> list[str]:
    """Checkpoint the activations of every n-th block (0: of none); return their names.

    The bits do not change: the second forward restores generators and leaves buffers such as a
    batch norm's statistics. Nor do module names (torch's `checkpoint_wrapper` adds a prefix).
    """
    if not every:
        return []
    found = blocks(model)
    if not found:
        raise ConfigError(f"--precision.recompute-every {every}: the model has no blocks (several "
                          "modules with layers in one nn.Sequential or nn.ModuleList); use 0.")
    chosen = dict(list(found.items())[every - 1 :: every])
    for module in chosen.values():
        module.forward = partial(_forward, module, module.forward)
    return list(chosen)


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name → block: the modules with submodules in an nn.Sequential or nn.ModuleList that holds
    several of them. Of nested containers (stages of blocks) the innermost count."""
    found: dict[str, nn.Module] = {}

    def search(module: nn.Module, path: str) -> None:
        layered = [child for child in module.children() if any(child.children())]
        listed = isinstance(module, nn.Sequential | nn.ModuleList) and len(layered) > 1
        for name, child in module.named_children():
            before = len(found)
            search(child, f"{path}{name}.")
            inner = len(found) > before or isinstance(child, nn.ModuleList | nn.ModuleDict)
            if listed and child in layered and not inner:
                found[path + name] = child

    search(model, "")
    return found


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(  # the contexts of the forward and of the recomputation in backward
        forward, *args, use_reentrant=False, **kwargs,
        context_fn=lambda: (contextlib.nullcontext(), buffers_preserved(module.modules())))
