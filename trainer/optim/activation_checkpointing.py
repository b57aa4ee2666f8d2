"""Activation checkpointing: backward recomputes the activations of selected blocks."""

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
    """Checkpoint the activations of every n-th block (0: of none): only its input is kept.

    The bits do not change: generators are restored for the second forward, and it leaves buffers
    such as a batch norm's statistics unchanged. Module names do not change (torch's
    `checkpoint_wrapper` adds a prefix).

    Returns:
        names of the checkpointed blocks.

    Raises:
        ConfigError: the model has no blocks.
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
    """Find the blocks of a model: name → block.

    Blocks are the modules with submodules in an nn.Sequential or nn.ModuleList that holds several
    of them. For nested containers (stages of blocks) the innermost count.
    """
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
    contexts = partial(_contexts, module)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    """Contexts of the forward and of the recomputation in backward."""
    return contextlib.nullcontext(), _buffers_preserved(module)


@contextlib.contextmanager
def _buffers_preserved(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers at the end of the context."""
    kept = [(inner, name, buffer, buffer.detach().clone()) for inner in module.modules()
            for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False)]
    try:
        yield
    finally:
        for owner, name, buffer, value in kept:
            setattr(owner, name, buffer)  # the forward may have assigned another
            buffer.data.copy_(value)  # .data: autograd must not see a change of a saved tensor
