"""An exponential moving average of the weights, over the updates: what is validated and exported.

Buffers aren't averaged: those of batch norms are averages already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.errors import CheckpointDamaged


class Ema:
    """The average of the trainable parameters, as `AveragedModel` makes it: the first update's
    weights, then decay · average + (1 - decay) · weights.

    It doesn't copy the module as that does: batch norms that are synchronised hold a process
    group, frozen parts need no copy, and compiled code stays in use.

    Args:
        before: called before the weights are exchanged.
    """

    def __init__(
        self, model: nn.Module, decay: float, before: Callable[[], None] = lambda: None
    ) -> None:
        self._live = {n: p for n, p in model.named_parameters() if p.requires_grad}
        first = {p: n for n, p in self._live.items()}
        self._named = {n: first[p] for n, p in model.named_parameters(remove_duplicate=False)
                       if p.requires_grad}
        self._average = {n: p.detach().clone() for n, p in self._live.items()}
        self._mix, self._before = get_ema_multi_avg_fn(decay), before
        self.updates = 0
        self.in_place = False
        """Whether the model holds the average now, and `tensors` the weights."""
        self.exchanging = False
        """Whether neither can be told, since an exchange has begun and isn't made."""

    def update(self) -> None:
        """Take in the weights of an update."""
        if self.updates:
            self._mix(list(self._average.values()), list(self._live.values()), self.updates)
        else:
            _copy(self._average, self._live)
        self.updates += 1

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """With the average in the model's parameters, in the storage that they have."""
        self._before()
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
        self.in_place, self.exchanging = not self.in_place, False

    def tensors(self) -> dict[str, Tensor]:
        """The average, by parameter name; of tied parameters by the first."""
        average = self._live if self.in_place else self._average
        return {n: t.detach() for n, t in average.items()}

    def averages(self) -> dict[str, Tensor]:
        """The average, by every name of each parameter."""
        average = self.tensors()
        return {n: average[first] for n, first in self._named.items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights that are trained, by every name of each parameter."""
        trained = self._average if self.in_place else self._live
        return {n: trained[first].detach() for n, first in self._named.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load(self, tensors: Mapping[str, Tensor] | None, state: Mapping[str, Any]) -> None:
        """Put it back; None where it is new: it begins with the next update.

        Raises:
            CheckpointDamaged: other parameters than these were averaged.
        """
        if tensors is None:
            tensors, state = self._live, {"updates": 0}
        for name in self._average:
            if name not in tensors or tensors[name].shape != self._average[name].shape:
                raise CheckpointDamaged(f"the averaged weights lack {name}, or have another size "
                                        "of it")
        _copy(self._average, tensors)
        self.updates = int(state["updates"])


def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(targets.values()), [sources[n] for n in targets])
