"""Exponential moving average (EMA) of the weights, used for validation and export. Buffers are not
averaged: those of batch norms are averages already."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.errors import CheckpointDamaged


class Ema:
    """Average of the trainable parameters, with the values of `AveragedModel`, which would copy the
    module: synchronised batch norms hold a process group, frozen parts need no copy, and compiled
    code stays in use."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._live = {n: p for n, p in model.named_parameters() if p.requires_grad}
        first = {p: n for n, p in self._live.items()}
        self._named = {n: first[p] for n, p in model.named_parameters(remove_duplicate=False)
                       if p.requires_grad}
        self._average = {n: p.detach().clone() for n, p in self._live.items()}
        self._mix = get_ema_multi_avg_fn(decay)
        self.updates = 0
        self.holds_average = False  # whether the model currently holds the average
        self.exchanging = False
        """Whether an exchange is in progress: both sets of tensors are incomplete."""

    def update(self) -> None:
        """Add the weights after an update."""
        if self.updates:
            self._mix(list(self._average.values()), list(self._live.values()), self.updates)
        else:
            _copy(self._average, self._live)
        self.updates += 1

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Context in which the model's parameters hold the average, in their own storage."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        kept = {n: p.detach().clone() for n, p in self._live.items()}
        self.exchanging = True
        _copy(self._live, self._average)
        _copy(self._average, kept)
        self.holds_average, self.exchanging = not self.holds_average, False

    def tensors(self) -> dict[str, Tensor]:
        """The average by parameter name. Tied parameters appear once, under their first name."""
        average = self._live if self.holds_average else self._average
        return {n: t.detach() for n, t in average.items()}

    def weights(self) -> dict[str, Tensor]:
        """The trained weights by parameter name. Tied parameters appear under each name."""
        trained = self._average if self.holds_average else self._live
        return {n: trained[first].detach() for n, first in self._named.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load(self, tensors: Mapping[str, Tensor] | None, state: Mapping[str, Any], *,
             extended: bool = False) -> None:
        """Restore the average; without `tensors` it starts with the next update. If it is
        `extended`, parameters without a saved average begin with their weights."""
        if tensors is None:
            tensors, state = self._live, {"updates": 0}
        if extended:
            tensors = {**self._live, **tensors}
        for name in self._average:
            if name not in tensors or tensors[name].shape != self._average[name].shape:
                raise CheckpointDamaged(f"the averaged weights do not contain {name}, or contain "
                                        "it with another shape")
        _copy(self._average, tensors)
        self.updates = int(state["updates"])


def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(targets.values()), [sources[n] for n in targets])
