"""Check the return value of a task's loss, and convert it to sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.task import Outcome, misused

RESERVED_METRICS = (
    "step", "epoch", "loss", "lr", "lrs", "grad_norm", "samples", "scale", "skipped", "replaced",
    "train_loss", "table",
)  # fmt: skip
"""Names that a task's metric can't have: the metrics file uses them, as it does each `val_NAME`."""

EMPTY = ("this was a micro-batch of 0 samples: a rank computes one if the number of ranks doesn't "
         "divide the micro-batches; if your model can't, let loss() return Outcome(sum(p.sum() for "
         "p in model.parameters()) * 0, 0) for it, or choose --batch.micro-size so that the ranks "
         "divide --batch.global-size / --batch.micro-size (check_task finds this beforehand)")
"""Note that is added to an exception in the loss of an empty micro-batch."""


def check_outcome(outcome: Any) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
    """Check an `Outcome`.

    Returns:
        The scalar total loss, and the metrics including each named loss.

    Raises:
        ConfigError: it isn't an `Outcome` of scalars, or a metric has a reserved name.
    """
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"the task's loss returned {type(outcome).__name__}; return "
                          "trainer.Outcome(total, count, metrics={name: (sum, count)}).")
    if wrong := misused(outcome):
        raise ConfigError(f"the task's loss: {wrong}.")
    metrics: dict[str, tuple[Any, Any]] = {}
    if isinstance(outcome.total, Mapping):
        metrics.update({name: (value, outcome.count) for name, value in outcome.total.items()})
        total = torch.stack([value.float() for value in outcome.total.values()]).sum()
    else:
        total = outcome.total
    for name in (*metrics, *outcome.metrics):
        if name in RESERVED_METRICS or name.startswith("val_"):
            raise ConfigError(f"the task's loss returned a metric {name!r}; this name is reserved, "
                              f"as are {', '.join(RESERVED_METRICS)} and all that begin with val_; "
                              "choose another name.")
    if twice := metrics.keys() & outcome.metrics.keys():
        raise ConfigError(f"the task's loss returned {min(twice)!r} both as a loss and a metric; "
                          "choose another name for one of them.")
    metrics.update(outcome.metrics)
    if not isinstance(total, Tensor) or total.dim() != 0 or total.is_complex():
        form = (f"{tuple(total.shape)} {total.dtype}" if isinstance(total, Tensor)
                else type(total).__name__)
        raise ConfigError(f"Outcome.total is {form}; return a scalar tensor: the loss summed over "
                          "the micro-batch.")
    return total, metrics
