"""Summation tree over micro-batches: same bits for any split of the leaves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.distributed.partition import block
from trainer.distributed.rank_invariant_reduction import (
    ALIGN,
    BatchNormStatistics,
    GradientLayout,
    ReductionPlan,
    TreeSum,
    split_slices,
    subtrees,
)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return left + right


def total(blocks: list[list[Any]], join: Any) -> Any:
    """Sum over blocks of adjacent leaves; each block is summed separately first."""
    leaves = sum(map(len, blocks))
    end, whole = 0, TreeSum(leaves, join)
    for mine in blocks:
        own = TreeSum(leaves, join)
        for value in mine:
            own.push((end, end + 1), value)
            end += 1
        for span, value in own.parts:
            whole.push(span, value)
    (span, value), = whole.parts
    assert span == (0, leaves)
    return value


@st.composite
def split_leaves(draw: st.DrawFn) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
    leaves = draw(st.integers(1, 40))
    values = [np.array(draw(st.lists(FLOATS, min_size=3, max_size=3)), dtype=np.float32)
              for _ in range(leaves)]
    ends = sorted(draw(st.sets(st.integers(1, leaves), max_size=leaves)) | {0, leaves})
    return [values[a:b] for a, b in itertools.pairwise(ends)], values


@settings(max_examples=100, deadline=None)
@given(split_leaves())
def test_the_bits_of_a_sum_do_not_depend_on_the_split(case):
    blocks, values = case

    assert total(blocks, add).tobytes() == total([values], add).tobytes()


@given(st.integers(1, 300), st.data())
def test_each_rank_owns_a_few_whole_nodes(leaves, data):
    size = data.draw(st.integers(1, leaves))
    spans = [subtrees(leaves, rank, size) for rank in range(size)]

    flat = [span for mine in spans for span in mine]
    assert [flat[0][0], flat[-1][1]] == [0, leaves]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(flat))
    for rank, mine in enumerate(spans):
        share = block(leaves, rank, size)
        assert (mine[0][0], mine[-1][1]) == (share.start, share.stop)
        assert len(mine) <= 2 * math.log2(len(share)) + 1
        assert all(a < b for a, b in itertools.pairwise(mine))
    plan = ReductionPlan.of(leaves, size)
    assert plan.spans == tuple(spans)
    assert len(set(plan.order.tolist())) == leaves


@given(st.integers(1, 100))
def test_the_tree_splits_after_the_largest_power_of_two_below_the_size(leaves):
    def tree(first: int, end: int) -> Any:
        if end - first == 1:
            return first
        middle = first + 2 ** math.ceil(math.log2(end - first) - 1)
        return tree(first, middle), tree(middle, end)

    assert total([list(range(leaves))], lambda a, b: (a, b)) == tree(0, leaves)


def test_one_buffer_holds_gradients_of_any_dtype_and_layout():
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tensors = [conv, torch.randn(5, dtype=torch.float64), torch.randn(3, 1), torch.randn(7).half(),
               torch.randn(2, 2).t()]
    layout = GradientLayout(tensors)
    whole = (0, layout.size)
    flat = layout.buffer(whole)
    torch._foreach_copy_(layout.views(flat), tensors)

    for view, tensor in zip(layout.views(flat), tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.stride() == tensor.stride()
    for num_ranks in (1, 2, 3, 7, 100):
        slices = split_slices(layout.size, num_ranks)
        assert len(slices) == num_ranks
        assert all(first % ALIGN == 0 or first == layout.size for first, _ in slices)
        pieces = [layout.numbers(flat[a:b], (a, b)) for a, b in slices]
        for dtype in {t.dtype for t in tensors}:
            expected = sum(t.numel() for t in tensors if t.dtype == dtype)
            assert sum(p.numel() for found in pieces for p in found if p.dtype == dtype) == expected


def folded(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers after batches that each start with those of the step boundary."""
    kept = {b: b.clone() for b in model.buffers()}
    statistics = BatchNormStatistics(model, kept)
    rows = torch.zeros(len(batches), statistics.width, dtype=torch.float64)
    for row, batch in zip(rows, batches, strict=True):
        for live, copy in kept.items():
            live.copy_(copy)
        model(batch)
        torch._foreach_copy_(statistics.views(row), statistics.live)
    statistics.fold(rows)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


class Twice(nn.Module):
    """Batch norms of each kind: called twice, without momentum, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None)
        self.frozen = nn.BatchNorm1d(5).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.mean(self.norm(2 * self.norm(x) + 1)))


@pytest.mark.parametrize("rows", [(4, 7, 2), (9,)])
def test_running_statistics_are_those_of_sequential_micro_batches(rows):
    torch.manual_seed(0)
    plain, ours = Twice(), Twice()
    for step in range(3):
        batches = [torch.randn(n, 5) * (step + 1) + n for n in rows]
        for batch in batches:
            plain(batch)
        found = folded(ours, batches)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(found[name], buffer, rtol=1e-6, atol=1e-6)
            # The bits of one micro-batch are torch's, except for those without a momentum.
            assert len(rows) > 1 or "mean." in name or torch.equal(found[name], buffer), name
