"""Training and evaluation mode of a model. The value of its `train()` and `eval()` is never used:
an override may return nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from trainer import rng


def set_training(model: nn.Module) -> None:
    """Put a new model in training mode, except modules that `model()` has put in evaluation mode.
    A model that is in evaluation mode as a whole, as libraries return pretrained ones, is put in
    training mode as a whole."""
    kept = [module for module in model.modules() if model.training and not module.training]
    model.train()
    for module in kept:
        module.training = False


def in_evaluation(model: nn.Module) -> list[str]:
    """Names of the outermost modules in evaluation mode."""
    names = [name for name, module in model.named_modules() if not module.training]
    return [name for name in names if name.rpartition(".")[0] not in names]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in evaluation mode; restores the mode of each module and the random generators."""
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        with rng.preserved():
            yield
    finally:
        model.train(training)
        for module, mode in modes:
            module.training = mode
