"""Whether all ranks still hold the same weights and optimizer state, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Of each tensor, the sum of its bits taken as whole numbers, modulo 2^64: int64 (n,).

    One flipped bit always changes it. On the tensors' own device.
    """
    sums = [_integers(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([s.to(sums[0].device) for s in sums])


def _integers(tensor: Tensor) -> Tensor:
    """The bits as whole numbers of 8 bytes where the memory can be cut so (a sum over them is
    several times as fast), otherwise one for each element."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    size = tensor.element_size()
    whole = (tensor.nbytes % 8 == 0 and tensor.storage_offset() * size % 8 == 0)
    if tensor.is_contiguous() and whole:
        return tensor.reshape(-1).view(torch.int64)
    return tensor.view(_INTEGERS[size])


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Ranks whose state differs.

    Attributes:
        step: at whose boundary it was found.
        ranks: those that differ from the majority; all if there is none (as with two ranks).
        tensors: the names of those that differ.
    """

    step: int
    ranks: list[int]
    tensors: list[str]


@dataclass
class Agreement:
    """Compares checksums among ranks, and remembers the last step at which they were equal.

    Args:
        tensors: gives all parameters and optimizer tensors by name.
    """

    tensors: Callable[[], Mapping[str, Tensor]]
    world: World
    step: int = 0
    """The last step at which all ranks are known to agree."""
    rounds: int = 0
    """How often in a row ranks have come to differ before they got further than the last time."""
    _differed: int = -1
    _evidence: dict[str, Any] = field(default_factory=dict)

    def check(self, step: int) -> Disagreement | None:
        """Collective. Compare at the boundary of `step`; None if all ranks agree."""
        tensors = self.tensors()
        own = checksums(tensors.values()).cpu()
        factors = torch.arange(1, 2 * len(own), 2) * _ODD
        totals = torch.zeros(self.world.size, dtype=torch.int64)
        totals[self.world.rank] = (own * factors).sum()
        self.world.all_sum(totals)
        if bool((totals == totals[0]).all()):
            self.step = step
            self.rounds = 0 if step > self._differed else self.rounds
            return None
        self.rounds, self._differed = self.rounds + 1, max(step, self._differed)
        rows = self.world.gather_json(own.tolist())
        names = [name for i, name in enumerate(tensors) if len({row[i] for row in rows}) > 1]
        common, votes = Counter(totals.tolist()).most_common(1)[0]
        majority = 2 * votes > self.world.size
        ranks = [r for r, total in enumerate(totals.tolist()) if not majority or total != common]
        if not majority and self.world.size == 2:
            self._keep_evidence(step, {name: tensors[name] for name in names})
        return Disagreement(step=step, ranks=ranks, tensors=names)

    def is_wanted(self, step: int) -> bool:
        """Whether the computation has come once more to where two ranks differed."""
        return self._evidence.get("step") == step

    def culprit(self) -> int | None:
        """Collective. Which of two ranks was wrong, now that the truth is here: the elements in
        which they differed were moved alike by the updates since, but for what was wrong in one.
        None if both are as far from the truth."""
        tensors, off = self.tensors(), torch.zeros(2, dtype=torch.float64)
        for name, (places, values) in self._evidence["elements"].items():
            truth = tensors[name].detach().cpu().reshape(-1)[places].double()
            distance = (values.double() - truth).abs().nan_to_num(torch.inf, torch.inf)
            off[self.world.rank] += distance.sum()
        self._evidence = {}
        first, second = self.world.gather_json(float(off[self.world.rank]).hex())
        return None if first == second else int(float.fromhex(second) > float.fromhex(first))

    def _keep_evidence(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Collective. The elements in which two ranks differ, and this rank's values of them."""
        elements = {}
        for name, tensor in tensors.items():
            own = tensor.detach().cpu().reshape(-1).clone()
            other = own.clone()
            self.world.broadcast([other], 0)
            bits = _INTEGERS[own.element_size()]
            differ = (own.view(bits) != other.view(bits)).to(torch.int32)
            places = self.world.all_sum(differ).nonzero().flatten()
            elements[name] = (places, own[places])
        self._evidence = {"step": step, "elements": elements}
