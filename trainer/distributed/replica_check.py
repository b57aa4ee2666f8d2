"""Replica check: compare weights and optimizer state of all ranks, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.world import World
from trainer.storage.tensorfile import INTEGERS

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of each tensor's bits as integers modulo 2^64, which any flipped bit changes."""
    sums = [integers(tensor).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([s.to(sums[0].device) for s in sums])


def integers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().view(INTEGERS[min(8, tensor.element_size())])


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """Result of a failed replica check: the ranks that differ from the majority (all ranks if there
    is none, as with two ranks), and the names of the tensors that differ."""

    ranks: list[int]
    tensors: list[str]


@dataclass
class ReplicaCheck:
    """Compares checksums over the ranks and remembers the last step at which they were equal."""

    tensors: Callable[[], Mapping[str, Tensor]]  # all parameters and optimizer tensors by name
    world: World
    step: int = 0  # the last one at which all ranks were equal
    consecutive_mismatches: int = 0  # without progress beyond the step of the one before
    _differed: int = -1
    _evidence: dict[str, Any] = field(default_factory=dict)

    def check(self, step: int) -> ReplicaMismatch | None:
        """Collective. Compare at the boundary of `step`; None if all ranks are equal."""
        tensors = self.tensors()
        own = checksums(tensors.values()).cpu()
        factors = torch.arange(1, 2 * len(own), 2) * _ODD
        totals = torch.zeros(self.world.size, dtype=torch.int64)
        totals[self.world.rank] = (own * factors).sum()
        self.world.all_sum(totals)
        if bool((totals == totals[0]).all()):
            self.step = step
            if step > self._differed:
                self.consecutive_mismatches = 0
            return None
        self.consecutive_mismatches += 1
        self._differed = max(step, self._differed)
        rows = self.world.gather_json(own.tolist())
        names = [name for i, name in enumerate(tensors) if len({row[i] for row in rows}) > 1]
        common, votes = Counter(totals.tolist()).most_common(1)[0]
        majority = 2 * votes > self.world.size
        ranks = [r for r, total in enumerate(totals.tolist()) if not majority or total != common]
        if not majority and self.world.size == 2:
            self._keep_evidence(step, {name: tensors[name] for name in names})
        return ReplicaMismatch(ranks=ranks, tensors=names)

    def restart_at(self, step: int) -> None:
        """Continue from this step after a roll-back."""
        self.step = step

    def has_recomputed(self, step: int) -> bool:
        """Whether the run has recomputed the step at which two ranks differed."""
        return self._evidence.get("step") == step

    def faulty_rank(self) -> int | None:
        """Collective. Which of two ranks was wrong, after the step was recomputed: the one whose
        recorded elements are farther from the recomputed ones. None if both are equally far."""
        tensors, distances = self.tensors(), torch.zeros(2, dtype=torch.float64)
        for name, (indices, values) in self._evidence["elements"].items():
            recomputed = tensors[name].detach().cpu().reshape(-1)[indices].double()
            distance = (values.double() - recomputed).abs().nan_to_num(torch.inf, torch.inf)
            distances[self.world.rank] += distance.sum()
        self._evidence = {}
        first, second = self.world.gather_json(float(distances[self.world.rank]).hex())
        return None if first == second else int(float.fromhex(second) > float.fromhex(first))

    def _keep_evidence(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Collective. Record the elements in which two ranks differ, with this rank's values."""
        elements = {}
        for name, tensor in tensors.items():
            own = tensor.detach().cpu().reshape(-1).clone()
            other = own.clone()
            self.world.broadcast([other], 0)
            differ = (integers(own) != integers(other)).to(torch.int32)
            indices = self.world.all_sum(differ).nonzero().flatten()
            elements[name] = (indices, own[indices])
        self._evidence = {"step": step, "elements": elements}
