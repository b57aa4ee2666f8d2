"""Summation tree over micro-batches: partial sums of each rank, and the exchange between ranks.

The leaves of the tree are the M numbered micro-batches. A node of two or more leaves splits after
the largest power of two below its size. A rank sums its contiguous block as far as that makes whole
nodes; the receiver of these continues in the same tree. So the sum has the same bits for any split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from trainer.distributed.partition import block, micro_batches_per_rank

Span = tuple[int, int]
"""A node of the tree, as the range of its leaves: (first, end)."""

T = TypeVar("T")

ALIGN = 16
"""Alignment in bytes of sections and slices in a flat buffer."""


def joins(left: Span, right: Span, leaves: int) -> bool:
    """Whether two adjacent nodes are the halves of a node."""
    size = left[1] - left[0]
    whole = size & (size - 1) == 0 and left[0] % (2 * size) == 0
    return whole and right == (left[1], min(left[1] + size, leaves))


class Fold(Generic[T]):
    """Sums values of adjacent nodes in their order; joins the halves of a node at once.

    Args:
        join: (left, right) → value of their parent node.
    """

    def __init__(self, leaves: int, join: Callable[[T, T], T]) -> None:
        self._leaves, self._join = leaves, join
        self.parts: list[tuple[Span, T]] = []
        """Nodes without their sibling so far: at most about 2 · log2(leaves)."""

    def push(self, span: Span, value: T) -> None:
        """Add the next node to the right."""
        self.parts.append((span, value))
        while len(self.parts) > 1 and joins(self.parts[-2][0], self.parts[-1][0], self._leaves):
            right, right_value = self.parts.pop()
            left, left_value = self.parts.pop()
            self.parts.append(((left[0], right[1]), self._join(left_value, right_value)))


def subtrees(leaves: int, rank: int, num_ranks: int) -> tuple[Span, ...]:
    """Largest nodes whose leaves all belong to a rank, from left to right."""
    fold: Fold[None] = Fold(leaves, lambda left, right: None)
    for number in block(leaves, rank, num_ranks):
        fold.push((number, number + 1), None)
    return tuple(span for span, _ in fold.parts)


def cut(size: int, num_ranks: int) -> list[Span]:
    """Split `size` bytes into one slice for each rank, about equal in size."""
    units = -(-size // ALIGN)
    ends = [min(size, units * rank // num_ranks * ALIGN) for rank in range(num_ranks)] + [size]
    return list(pairwise(ends))


@dataclass(frozen=True)
class Plan:
    """Which partial sums the ranks exchange in a step of M micro-batches."""

    leaves: int
    spans: tuple[tuple[Span, ...], ...]
    """Subtrees of each rank. Round n exchanges the n-th subtree of every rank."""
    order: list[int]
    """Index of each micro-batch's row among the rows of all ranks, slot by slot."""

    @classmethod
    def of(cls, leaves: int, num_ranks: int) -> Plan:
        """The plan for `leaves` micro-batches on `num_ranks` ranks."""
        each = micro_batches_per_rank(leaves, num_ranks)
        return cls(leaves, tuple(subtrees(leaves, rank, num_ranks) for rank in range(num_ranks)),
                   [rank * each + place for rank in range(num_ranks)
                    for place in range(len(block(leaves, rank, num_ranks)))])

    @property
    def rounds(self) -> int:
        return max(map(len, self.spans))
