"""The tree in which micro-batches are summed: which partial sums a rank owns, and who sends what.

The tree over M leaves, the numbered micro-batches: a node of two or more splits after the largest
power of two below its size. A rank adds up its contiguous block as far as that makes whole nodes;
whoever gets these goes on in the same tree, so that the sum has the same bits for any split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from trainer.data.sampler import block, slots

Span = tuple[int, int]
"""A node of the tree, by the leaves under it: (first, end)."""

T = TypeVar("T")

ALIGN = 16
"""Bytes: sections and slices of a flat buffer begin at multiples of it."""


def joins(left: Span, right: Span, leaves: int) -> bool:
    """Whether two neighbours are the halves of a node."""
    size = left[1] - left[0]
    whole = size & (size - 1) == 0 and left[0] % (2 * size) == 0
    return whole and right == (left[1], min(left[1] + size, leaves))


class Fold(Generic[T]):
    """Values of neighbouring nodes in their order; halves of a node are joined at once.

    Args:
        join: (left, right) → the value of the node that they make.
    """

    def __init__(self, leaves: int, join: Callable[[T, T], T]) -> None:
        self._leaves, self._join = leaves, join
        self.parts: list[tuple[Span, T]] = []
        """What is joined no further so far: at most about 2 · log2(leaves)."""

    def push(self, span: Span, value: T) -> None:
        """The next node to the right."""
        self.parts.append((span, value))
        while len(self.parts) > 1 and joins(self.parts[-2][0], self.parts[-1][0], self._leaves):
            right, right_value = self.parts.pop()
            left, left_value = self.parts.pop()
            self.parts.append(((left[0], right[1]), self._join(left_value, right_value)))


def subtrees(leaves: int, rank: int, num_ranks: int) -> tuple[Span, ...]:
    """The largest nodes that a rank owns whole, from left to right."""
    fold: Fold[None] = Fold(leaves, lambda left, right: None)
    for number in block(leaves, rank, num_ranks):
        fold.push((number, number + 1), None)
    return tuple(span for span, _ in fold.parts)


def cut(size: int, num_ranks: int) -> list[Span]:
    """The slice of `size` bytes that each rank adds up: about equal ones."""
    units = -(-size // ALIGN)
    ends = [min(size, units * rank // num_ranks * ALIGN) for rank in range(num_ranks)] + [size]
    return list(pairwise(ends))


@dataclass(frozen=True)
class Plan:
    """Who sends what in a step of M micro-batches."""

    leaves: int
    spans: tuple[tuple[Span, ...], ...]
    """Of each rank, its subtrees. The n-th ones of all travel in round n."""
    order: list[int]
    """Where the row of each micro-batch is among those of all ranks, slot by slot."""

    @classmethod
    def of(cls, leaves: int, num_ranks: int) -> Plan:
        """The plan for so many micro-batches and ranks."""
        each = slots(leaves, num_ranks)
        return cls(leaves, tuple(subtrees(leaves, rank, num_ranks) for rank in range(num_ranks)),
                   [rank * each + place for rank in range(num_ranks)
                    for place in range(len(block(leaves, rank, num_ranks)))])

    @property
    def rounds(self) -> int:
        return max(map(len, self.spans))
