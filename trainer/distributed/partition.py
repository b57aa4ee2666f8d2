"""Partition of the numbered micro-batches of a step over the ranks."""

from __future__ import annotations


def block(micro_batches: int, rank: int, num_ranks: int) -> range:
    """The numbers of the micro-batches that a rank computes."""
    return range(rank * micro_batches // num_ranks, (rank + 1) * micro_batches // num_ranks)


def micro_batches_per_rank(micro_batches: int, num_ranks: int) -> int:
    """Forward passes per rank and step. A rank with a smaller block runs a stand-in, so that all
    ranks call the same collectives."""
    return -(-micro_batches // num_ranks)
