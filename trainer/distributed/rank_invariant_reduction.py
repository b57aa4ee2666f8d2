"""Rank-invariant reduction: gradients have the same bits for any number of ranks, since they are
summed in one tree over the numbers of the micro-batches (docs/elastic.md)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.distributed.ddp import REQUESTED
from trainer.distributed.partition import block, micro_batches_per_rank
from trainer.distributed.torch_private import BatchNorm
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import World

if TYPE_CHECKING:
    from trainer.checkpoint.buffers import Buffers
    from trainer.data.map_dataset import MicroBatch
    from trainer.data.sampler import BatchPlan, MicroBatchSpec
    from trainer.distributed.ddp import Objective

T = TypeVar("T")
Span = tuple[int, int]  # a node of the tree, as the range of its leaves: (first, end)
ALIGN = 16  # bytes: alignment of sections and slices in a flat buffer
SMALL = 1 << 18
"""Up to this many bytes, every rank receives all complete partial sums: one exchange, not two."""


def are_siblings(left: Span, right: Span, leaves: int) -> bool:
    """Whether two adjacent nodes are the halves of a node."""
    size = left[1] - left[0]
    whole = size & (size - 1) == 0 and left[0] % (2 * size) == 0
    return whole and right == (left[1], min(left[1] + size, leaves))


class TreeSum(Generic[T]):
    """Sums values of adjacent nodes in their order; joins the halves of a node immediately."""

    def __init__(self, leaves: int, join: Callable[[T, T], T]) -> None:
        self._leaves, self._join = leaves, join
        self.parts: list[tuple[Span, T]] = []  # nodes without their sibling so far

    def push(self, span: Span, value: T) -> None:
        """Add the next node to the right."""
        while self.parts and are_siblings(self.parts[-1][0], span, self._leaves):
            (first, _), left = self.parts.pop()
            span, value = (first, span[1]), self._join(left, value)
        self.parts.append((span, value))


def subtrees(leaves: int, rank: int, num_ranks: int) -> tuple[Span, ...]:
    """Largest nodes whose leaves all belong to a rank, from left to right."""
    total: TreeSum[None] = TreeSum(leaves, lambda left, right: None)
    for number in block(leaves, rank, num_ranks):
        total.push((number, number + 1), None)
    return tuple(span for span, _ in total.parts)


def split_slices(size: int, num_ranks: int) -> list[Span]:
    """Split `size` bytes into one slice for each rank, about equal in size."""
    units = -(-size // ALIGN)
    ends = [min(size, units * rank // num_ranks * ALIGN) for rank in range(num_ranks)] + [size]
    return list(pairwise(ends))


@dataclass(frozen=True)
class ReductionPlan:
    """Which partial sums the ranks exchange in a step of M micro-batches."""

    leaves: int
    spans: tuple[tuple[Span, ...], ...]  # subtrees of each rank; round n exchanges the n-th
    order: Tensor  # index of each micro-batch's row among the rows of all ranks; on the device

    @classmethod
    def of(cls, leaves: int, num_ranks: int, device: torch.device | None = None) -> ReductionPlan:
        ranks, each = range(num_ranks), micro_batches_per_rank(leaves, num_ranks)
        order = [rank * each + place for rank in ranks
                 for place in range(len(block(leaves, rank, num_ranks)))]
        return cls(leaves, tuple(subtrees(leaves, rank, num_ranks) for rank in ranks),
                   torch.tensor(order, device=device))


class GradientLayout:
    """Gradients in a flat byte buffer, by dtype, each with the strides that autograd gives it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._offsets = [0] * len(parameters)
        self._sections: list[tuple[torch.dtype, int, int]] = []
        self.size = 0
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            first = self.size
            for i, parameter in enumerate(parameters):
                if parameter.dtype == dtype:
                    self._offsets[i] = self.size
                    self.size += parameter.nbytes
            self._sections.append((dtype, first, self.size))
            self.size = -(-self.size // ALIGN) * ALIGN

    def buffer(self, span: Span) -> Tensor:
        return torch.empty(span[1] - span[0], dtype=torch.uint8, device=self._parameters[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A whole buffer as gradients."""
        views = []
        for parameter, offset in zip(self._parameters, self._offsets, strict=True):
            dense = torch.empty_like(parameter).stride() == parameter.stride()
            row = flat[offset : offset + parameter.nbytes].view(parameter.dtype)
            views.append(row.as_strided(parameter.shape, parameter.stride()) if dense
                         else row.view(parameter.shape))
        return views

    def numbers(self, piece: Tensor, span: Span) -> list[Tensor]:
        """A slice as one vector per dtype."""
        parts = [(dtype, max(first, span[0]), min(end, span[1]))
                 for dtype, first, end in self._sections]
        return [piece[first - span[0] : end - span[0]].view(dtype)
                for dtype, first, end in parts if first < end]


class GradientBuffer(NamedTuple):
    """Memory for gradients or a partial sum, with its views as gradients and as vectors."""

    flat: Tensor
    gradients: list[Tensor]
    vectors: list[Tensor]


class BatchNormStatistics:
    """Running statistics of batch norms, combined in the order of micro-batches, in float64.

    Each micro-batch starts with the statistics b of the step boundary and ends with a row x of k
    calls. From the statistics r so far it gives (1 - momentum)^k · (r - b) + x.
    """

    def __init__(self, model: nn.Module, kept: dict[Tensor, Tensor]) -> None:
        modules = [m for m in model.modules() if isinstance(m, BatchNorm)
                   and type(m).forward is BatchNorm.forward
                   and m.running_mean is not None and m.num_batches_tracked is not None]
        found = [b for m in modules for b in (m.running_mean, m.running_var)]
        self.live = [b for b in (*found, *(m.num_batches_tracked for m in modules))
                     if b is not None]
        self._kept = [kept[b] for b in self.live]
        self.width = sum(b.numel() for b in self.live)
        self._split = self.width - len(modules)
        device = self.live[0].device if self.live else None
        self._memory = torch.empty(self.width, dtype=torch.float64, device=device)
        self._views = self.views(self._memory)
        self._owner = torch.tensor([i for i, m in enumerate(modules)
                                    for _ in range(2 * m.num_features)], device=device)
        decays = [1.0 if m.momentum is None else 1 - m.momentum for m in modules]
        self._decay = torch.tensor(decays, dtype=torch.float64, device=device)
        plain = torch.tensor([m.momentum is None for m in modules], device=device)
        self._mean = plain[self._owner] if any(m.momentum is None for m in modules) else None

    def views(self, row: Tensor) -> list[Tensor]:
        """A row as one tensor for each tensor of `live`."""
        parts = row.split([b.numel() for b in self.live])
        return [part.view(b.shape) for part, b in zip(parts, self.live, strict=True)]

    def fold(self, rows: Tensor) -> None:
        """Set the statistics to those after all micro-batches; `rows` is float64, (M, width)."""
        if not self.live:
            return
        torch._foreach_copy_(self._views, self._kept)
        base, base_count = self._memory[: self._split], self._memory[self._split :]
        calls = rows[:, self._split :] - base_count
        counts = base_count + calls.long().cumsum(0)  # CUDA sums floats in any order
        decays = (self._decay**calls).index_select(1, self._owner)
        now = base
        for i, (made, decay) in enumerate(zip(rows[:, : self._split], decays, strict=True)):
            after = torch.addcmul(made, decay, now - base)
            if self._mean is not None:  # momentum None: the cumulative mean over all calls
                k, first, new = (count[self._owner] for count in (calls[i], base_count, counts[i]))
                mean = ((new - k) * now + made * (first + k) - first * base) / new.clamp(min=1)
                after = torch.where(self._mean, mean, after)
            now = after
        torch.cat([now, counts[-1]], out=self._memory)
        torch._foreach_copy_(self.live, self._views)


class RankInvariantReduction:
    """Wraps the micro-batches of a step: collects each one's gradients and leaves their sums.

    Collective. The constructor broadcasts the weights of rank 0.

    Args:
        parameters: the trained ones.
        optional: whether a parameter may have no gradient on any rank; it then keeps None.
    """

    def __init__(self, objective: Objective, parameters: Sequence[Tensor], buffers: Buffers,
                 world: World, batch_plan: BatchPlan, *, optional: bool) -> None:
        model = objective.model
        world.broadcast([*model.parameters(), *model.buffers()])
        self._objective, self._parameters, self._buffers = objective, parameters, buffers
        self._rank, self._size, self._group = world.rank, world.size, world.group
        self._batch_plan, self._optional = batch_plan, optional
        self.statistics = BatchNormStatistics(model, dict(buffers.pairs()))
        self._shared = frozenset(self.statistics.live)  # buffers that stay equal on all ranks
        buffers.note_shared(self._shared)
        self._layout = GradientLayout(self._parameters)
        self._device = parameters[0].device
        self._make_plan = functools.cache(partial(
            ReductionPlan.of, num_ranks=world.size, device=self._device))
        self._allocated: list[GradientBuffer] = []
        self._open: GradientBuffer | None = None  # the one to which backward adds
        self._pieces: dict[Any, Tensor] = {}
        self._used: set[int] = set()
        for i, parameter in enumerate(self._parameters if optional else ()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._used.add(i))
        self._rows: Tensor | None = None
        self._records: list[list[Tensor]] = []

    def __call__(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Collective. Yield the micro-batches; gradients and sums are complete after the last."""
        for index, micro in enumerate(micro_batches):
            if index == 0:
                self._begin(micro.spec.step)
            else:
                self._buffers.put_back()
            if self._open is None and micro.spec.number >= 0:
                self._accumulate()
            yield micro
            self._take(micro.spec, index)
        self._finish()

    def _begin(self, step: int) -> None:
        self._plan = plan = self._make_plan(self._batch_plan.micro_batches(step))
        self._mine = block(plan.leaves, self._rank, self._size)
        self._fold: TreeSum[GradientBuffer] = TreeSum(plan.leaves, self._join)
        self._free, self._open = list(self._allocated), None
        self._used.clear()  # rehearsals have used parameters too
        self._sent, self._round, self._works = list[GradientBuffer](), 0, list[Any]()
        num = sum(map(len, plan.spans))
        self._whole = self._size == num == 2 or num * self._layout.size <= SMALL
        self._slices = ([(0, self._layout.size)] * self._size if self._whole
                        else split_slices(self._layout.size, self._size))

    def _accumulate(self) -> None:
        """Let the next backward add to memory of -0.0: x + -0.0 has the bits of x."""
        self._open = self._free_buffer()
        for vector in self._open.vectors:
            vector.fill_(-0.0)
        for parameter, view in zip(self._parameters, self._open.gradients, strict=True):
            parameter.grad = view

    def _free_buffer(self) -> GradientBuffer:
        if self._free:
            return self._free.pop()
        flat = self._layout.buffer(whole := (0, self._layout.size)).zero_()
        self._allocated.append(GradientBuffer(
            flat, self._layout.views(flat), self._layout.numbers(flat, whole)))
        return self._allocated[-1]

    def _join(self, left: GradientBuffer, right: GradientBuffer) -> GradientBuffer:
        for a, b in zip(left.vectors, right.vectors, strict=True):
            a.add_(b)
        self._free.append(right)
        return left

    def _take(self, spec: MicroBatchSpec, index: int) -> None:
        """Store the results of the micro-batch at `index`; begin to send a complete subtree."""
        own = self._objective.swap_sums(None)
        self._on_host = isinstance(own, list)
        if self._rows is None:
            self._rows = self._make_rows(len(own))
        row = self._rows[index]
        row[: len(own)] = torch.tensor(own, dtype=row.dtype) if isinstance(own, list) else own
        if self._optional:
            used = torch.tensor([float(i in self._used and spec.number >= 0)
                                 for i in range(len(self._parameters))],
                                dtype=row.dtype, pin_memory=row.is_cuda)
            row[len(own) : len(own) + len(used)].copy_(used, non_blocking=True)
            self._used.clear()
        if self.statistics.live:
            torch._foreach_copy_(self._records[index], self.statistics.live)
        number = spec.number
        if number % 2 == 0 and number + 1 in self._mine:
            return  # the backward of its sibling adds to the same buffer, which gives their parent
        for parameter in self._parameters:
            parameter.grad = None
        if number < 0:
            return
        assert self._open is not None, "each micro-batch has a buffer"
        first = number - (number % 2 == 1 and number - 1 in self._mine)
        self._fold.push((first, number + 1), self._open)
        self._open = None
        mine = self._plan.spans[self._rank]
        if self._group is not None and self._fold.parts and self._round < len(mine) and (
                self._fold.parts[-1][0] == mine[self._round]):
            self._send(self._fold.parts.pop()[1])

    def _make_rows(self, sums: int) -> Tensor:
        """Allocate a row per micro-batch: sums; which parameters had a gradient; statistics."""
        self._sums = sums
        self._width = sums + self._optional * len(self._parameters)
        micro_batches = -(-self._batch_plan.global_size // self._batch_plan.micro_size)
        max_rows = micro_batches_per_rank(micro_batches, self._size)
        rows = torch.zeros(max_rows, self._width + self.statistics.width, dtype=torch.float64,
                           device=self._device)
        self._records = [self.statistics.views(row[self._width :]) for row in rows]
        return rows

    def _send(self, own: GradientBuffer | None) -> None:
        """Collective. Begin the next round: exchange the next partial sum of each rank that has a
        further one; this rank's is `own`."""
        outgoing: list[tuple[Tensor, int]] = []
        if own is not None:
            self._sent.append(own)
            outgoing = [(own.flat[a:b], rank) for rank, (a, b) in enumerate(self._slices)]
        self._exchange(outgoing, [(self._received(rank, self._round), rank)
                                  for rank, spans in enumerate(self._plan.spans)
                                  if self._round < len(spans)])
        self._round += 1

    def _exchange(self, outgoing: Iterable[tuple[Tensor, int]],
                  incoming: Iterable[tuple[Tensor, int]]) -> None:
        calls = [dist.P2POp(operation, tensor, rank, self._group)
                 for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
                 for tensor, rank in tensors if rank != self._rank and tensor.numel()]
        if calls:
            self._works += dist.batch_isend_irecv(calls)

    def _wait_for_peers(self) -> None:
        with waiting_for(WaitsFor.PEERS):
            for work in self._works:
                work.wait()
        self._works.clear()

    def _finish(self) -> None:
        """Collective. Set gradients, sums and statistics to those of all micro-batches."""
        assert self._rows is not None, "no micro-batch was taken"
        plan, ranks = self._plan, range(self._size)
        rows = self._rows[: micro_batches_per_rank(plan.leaves, self._size)]
        if self._group is None:
            (_, total), = self._fold.parts
            all_rows = numbered = rows
        else:
            all_rows = rows.new_empty(self._size, *rows.shape)
            all_rows[self._rank] = rows
            while self._round < max(map(len, plan.spans)):
                self._send(None)
            self._exchange([(rows, rank) for rank in ranks], [(all_rows[r], r) for r in ranks])
            self._wait_for_peers()
            total = self._add_up()
            all_rows = all_rows.flatten(0, 1)
            numbered = all_rows.index_select(0, plan.order)
        used = None
        if self._optional:
            with waiting_for(WaitsFor.DEVICE):
                used = numbered[:, self._sums : self._width].sum(0).tolist()
        for i, (parameter, view) in enumerate(zip(self._parameters, total.gradients, strict=True)):
            parameter.grad = view if used is None or used[i] else None
        sums = numbered[:, : self._sums].sum(0)
        sums[REQUESTED] = all_rows[:, REQUESTED].sum(0)  # includes rows of stand-ins
        self.statistics.fold(numbered[:, self._width :])
        if (nonfinite := self._buffers.nonfinite(self._shared)) is not None:  # equal on all ranks
            sums[0] += nonfinite  # detects micro-batches before the last one too
        self._objective.swap_sums(sums.tolist() if self._on_host else sums)

    def _add_up(self) -> GradientBuffer:
        """Collective. Sum this rank's slice, exchange the slices, return the sums' buffer."""
        result = self._sent[0] if self._sent else self._free_buffer()
        first, end = own = self._slices[self._rank]
        target = result.flat[first:end]

        def join(left: Tensor, right: Tensor) -> Tensor:
            out = right if right.data_ptr() == target.data_ptr() else left
            for a, b, c in zip(*(self._layout.numbers(t, own) for t in (left, right, out)),
                               strict=True):
                torch.add(a, b, out=c)
            return out

        tree = TreeSum(self._plan.leaves, join)
        for rank, spans in enumerate(self._plan.spans):
            for number, span in enumerate(spans):
                tree.push(span, self._received(rank, number) if rank != self._rank else
                          self._sent[number].flat[first:end])
        (_, total), = tree.parts
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)
        if not self._whole:
            self._exchange([(target, rank) for rank in range(self._size)],
                           [(result.flat[a:b], r) for r, (a, b) in enumerate(self._slices)])
            self._wait_for_peers()
        return result

    def _received(self, rank: int, number: int) -> Tensor:
        """Memory for this rank's slice of another rank's partial sum in a round."""
        key = (rank, number, self._whole)
        if key not in self._pieces:
            self._pieces[key] = self._layout.buffer(self._slices[self._rank])
        return self._pieces[key]
