"""Gradients summed by one tree over the numbers of the micro-batches, whoever computes them: the
same bits for any number of ranks (docs/elastic.md)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data.reading import Micro
from trainer.data.sampler import Plan as Windows
from trainer.data.sampler import Slot, block, micro_batches_per_rank
from trainer.leaf import OnOff
from trainer.parallel import WISHED
from trainer.step import Step
from trainer.tree import ALIGN, Fold, Plan, Span, cut
from trainer.waits import WaitsFor, waiting_for
from trainer.world import World

SMALL = 1 << 18
"""Bytes up to which each rank gets all partial sums whole, in one exchange instead of two."""


class Layout:
    """Where gradients lie in a flat buffer of bytes: those of a dtype side by side, each with the
    strides that autograd gives it."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._places = [0] * len(parameters)
        self._sections: list[tuple[torch.dtype, int, int]] = []
        self.size = 0
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            first = self.size
            for i, parameter in enumerate(parameters):
                if parameter.dtype == dtype:
                    self._places[i] = self.size
                    self.size += parameter.nbytes
            self._sections.append((dtype, first, self.size))
            self.size = -(-self.size // ALIGN) * ALIGN

    def buffer(self, span: Span) -> Tensor:
        """Memory for a slice."""
        return torch.empty(span[1] - span[0], dtype=torch.uint8, device=self._parameters[0].device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in a whole buffer."""
        found = []
        for parameter, place in zip(self._parameters, self._places, strict=True):
            dense = torch.empty_like(parameter).stride() == parameter.stride()
            row = flat[place : place + parameter.nbytes].view(parameter.dtype)
            found.append(row.as_strided(parameter.shape, parameter.stride()) if dense
                         else row.view(parameter.shape))
        return found

    def numbers(self, piece: Tensor, span: Span) -> list[Tensor]:
        """A slice as numbers: one vector a dtype."""
        parts = [(dtype, max(first, span[0]), min(end, span[1]))
                 for dtype, first, end in self._sections]
        return [piece[first - span[0] : end - span[0]].view(dtype)
                for dtype, first, end in parts if first < end]


class Statistics:
    """Running statistics of batch norms that see one micro-batch at a time.

    Each micro-batch begins with those of the boundary; what it makes of them is a row, and the rows
    are put one after the other in the order of their numbers, in float64. With r the statistics
    and b those of the boundary, row x of k calls gives (1 - momentum)^k · (r - b) + x.
    """

    def __init__(self, model: nn.Module, kept: dict[Tensor, Tensor]) -> None:
        modules = [m for m in model.modules() if isinstance(m, _BatchNorm)
                   and type(m).forward is _BatchNorm.forward
                   and m.running_mean is not None and m.num_batches_tracked is not None]
        found = [b for m in modules for b in (m.running_mean, m.running_var)]
        self.live = [b for b in (*found, *(m.num_batches_tracked for m in modules))
                     if b is not None]
        self._kept = [kept[b] for b in self.live]
        self._sizes = [b.numel() for b in self.live]
        self.width = sum(self._sizes)
        device = self.live[0].device if self.live else None
        self._split = self.width - len(modules)
        self._memory = torch.empty(self.width, dtype=torch.float64, device=device)
        self._views = self.views(self._memory)
        self._owner = torch.tensor([i for i, m in enumerate(modules)
                                    for _ in range(2 * m.num_features)], device=device)
        decays = [1.0 if m.momentum is None else 1 - m.momentum for m in modules]
        self._decay = torch.tensor(decays, dtype=torch.float64, device=device)
        plain = torch.tensor([m.momentum is None for m in modules], device=device)
        self._mean = plain[self._owner] if any(m.momentum is None for m in modules) else None

    def views(self, row: Tensor) -> list[Tensor]:
        """The places of a row for each of `live`."""
        parts = row.split(self._sizes)
        return [part.view(b.shape) for part, b in zip(parts, self.live, strict=True)]

    def fold(self, rows: Tensor) -> None:
        """Put the statistics after all micro-batches in place; float64, (M, width)."""
        if not self.live:
            return
        torch._foreach_copy_(self._views, self._kept)
        base, base_count = self._memory[: self._split], self._memory[self._split :]
        calls = rows[:, self._split :] - base_count
        counts = base_count + calls.cumsum(0)
        decays = (self._decay**calls).index_select(1, self._owner)
        now = base
        for i, (made, decay) in enumerate(zip(rows[:, : self._split], decays, strict=True)):
            after = torch.addcmul(made, decay, now - base)
            if self._mean is not None:  # momentum None: the plain mean over all calls
                k, first, new = (count[self._owner] for count in (calls[i], base_count, counts[i]))
                mean = ((new - k) * now + made * (first + k) - first * base) / new.clamp(min=1)
                after = torch.where(self._mean, mean, after)
            now = after
        torch.cat([now, counts[-1]], out=self._memory)
        torch._foreach_copy_(self.live, self._views)


class Reduction:
    """Around the micro-batches of a step: takes each one's gradients, and leaves the sums over all.

    Args:
        step: the objective, the model, what is trained, and the buffers of the last boundary.
        windows: tell M of a step.
        optional: whether a parameter may have no gradient on any rank, and is then left alone.
    """

    def __init__(self, step: Step, world: World, windows: Windows, *, optional: bool) -> None:
        self._objective, self._parameters, self._buffers = (
            step.objective, step.parameters, step.buffers)
        self._rank, self._size, self._group = world.rank, world.size, world.group
        self._windows, self._optional = windows, optional
        self.statistics = Statistics(step.model, dict(step.buffers.pairs()))
        self.shared = frozenset(self.statistics.live)
        """Buffers that are equal on all ranks after the last micro-batch."""
        self._layout = Layout(self._parameters)
        self._plan = functools.cache(functools.partial(Plan.of, num_ranks=world.size))
        self._flats: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []
        """Partial sums: whole buffers, their views as gradients, and as vectors."""
        self._open: int | None = None
        """The buffer to which the backward adds."""
        self._pieces: dict[Any, Tensor] = {}
        self._used: set[int] = set()
        for i, parameter in enumerate(self._parameters if optional else ()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._used.add(i))
        self._rows: Tensor | None = None
        self._records: list[list[Tensor]] = []

    def __call__(self, micro_batches: Iterable[Micro]) -> Iterator[Micro]:
        """Collective. The same micro-batches; gradients and sums are complete after the last."""
        for place, micro in enumerate(micro_batches):
            if place:
                self._buffers.put_back()
            else:
                self._begin(micro.slot.step)
            if self._open is None and micro.slot.number >= 0:
                self._accumulate()
            yield micro
            self._take(micro.slot, place)
        self._finish()

    def _begin(self, step: int) -> None:
        self._now = plan = self._plan(self._windows.micro_batches(step))
        self._mine = block(plan.leaves, self._rank, self._size)
        self._fold: Fold[int] = Fold(plan.leaves, self._join)
        self._free, self._open = list(range(len(self._flats))), None
        self._sent, self._round, self._works = list[int](), 0, list[Any]()
        num = sum(map(len, plan.spans))
        self._whole = self._size == num == 2 or num * self._layout.size <= SMALL
        self._slices = ([(0, self._layout.size)] * self._size if self._whole
                        else cut(self._layout.size, self._size))

    def _accumulate(self) -> None:
        """Let the next backward add to memory that is neutral: x + -0.0 has the bits of x."""
        self._open = self._flat()
        _, views, numbers = self._flats[self._open]
        for part in numbers:
            part.fill_(-0.0)
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view

    def _flat(self) -> int:
        """The number of a buffer that isn't in use."""
        if self._free:
            return self._free.pop()
        whole = (0, self._layout.size)
        flat = self._layout.buffer(whole).zero_()
        self._flats.append((flat, self._layout.views(flat), self._layout.numbers(flat, whole)))
        return len(self._flats) - 1

    def _join(self, left: int, right: int) -> int:
        for a, b in zip(self._flats[left][2], self._flats[right][2], strict=True):
            a.add_(b)
        self._free.append(right)
        return left

    def _take(self, slot: Slot, place: int) -> None:
        own = self._objective.swap_sums(None)
        self._on_host = isinstance(own, list)
        if self._rows is None:
            self._rows = self._make_rows(len(own))
        row = self._rows[place]
        row[: len(own)] = torch.tensor(own, dtype=row.dtype) if isinstance(own, list) else own
        if self._optional:
            there = torch.tensor([float(i in self._used) for i in range(len(self._parameters))])
            row[len(own) : len(own) + len(there)] = there * (slot.number >= 0)
            self._used.clear()
        if self.statistics.live:
            torch._foreach_copy_(self._records[place], self.statistics.live)
        number = slot.number
        if number % 2 == 0 and number + 1 in self._mine:
            return  # the backward of its sibling adds to it, which makes their node
        for parameter in self._parameters:
            parameter.grad = None
        if number < 0:
            return
        assert self._open is not None, "there is memory for each micro-batch"
        first = number - (number % 2 == 1 and number - 1 in self._mine)
        self._fold.push((first, number + 1), self._open)
        self._open = None
        mine = self._now.spans[self._rank]
        if self._group is not None and self._fold.parts and self._round < len(mine) and (
                self._fold.parts[-1][0] == mine[self._round]):
            self._send(self._fold.parts.pop()[1])

    def _make_rows(self, sums: int) -> Tensor:
        """For each slot a row of numbers: sums; which parameters had a gradient; statistics."""
        self._sums = sums
        self._width = sums + self._optional * len(self._parameters)
        micro_batches = -(-self._windows.global_size // self._windows.micro_size)
        most = micro_batches_per_rank(micro_batches, self._size)
        rows = torch.zeros(most, self._width + self.statistics.width, dtype=torch.float64,
                           device=self._parameters[0].device)
        self._records = [self.statistics.views(row[self._width :]) for row in rows]
        return rows

    def _send(self, own: int | None) -> None:
        """Collective. Begin the next round: this rank's next partial sum, if it has one, for those
        of the others."""
        number, outgoing, incoming = self._round, list[Any](), list[Any]()
        if own is not None:
            flat = self._flats[own][0]
            self._sent.append(own)
            outgoing = [(flat[first:end], rank) for rank, (first, end) in enumerate(self._slices)]
        for rank, spans in enumerate(self._now.spans):
            if number < len(spans):
                incoming.append((self._piece(rank, number), rank))
        self._exchange(outgoing, incoming)
        self._round += 1

    def _exchange(
        self, outgoing: Iterable[tuple[Tensor, int]], incoming: Iterable[tuple[Tensor, int]]
    ) -> None:
        """Begin to send to and receive from each other rank."""
        calls = [dist.P2POp(operation, tensor, rank, self._group)
                 for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
                 for tensor, rank in tensors if rank != self._rank and tensor.numel()]
        if calls:
            self._works += dist.batch_isend_irecv(calls)

    def wait_for_peers(self) -> None:
        """Until all that was begun is done.

        Raises:
            RuntimeError: a peer is gone, or was too slow.
        """
        with waiting_for(WaitsFor.PEERS):
            for work in self._works:
                work.wait()
        self._works.clear()

    def _finish(self) -> None:
        """Collective. Gradients, sums and statistics of all micro-batches."""
        assert self._rows is not None, "no micro-batch was taken"
        plan, rows = self._now, self._rows[: micro_batches_per_rank(self._now.leaves, self._size)]
        if self._group is None:
            (_, total), = self._fold.parts
            every = numbered = rows
        else:
            every = rows.new_empty(self._size, *rows.shape)
            every[self._rank] = rows
            while self._round < plan.rounds:
                self._send(None)
            others = range(self._size)
            self._exchange([(rows, rank) for rank in others], [(every[r], r) for r in others])
            self.wait_for_peers()
            total = self._add_up()
            every = every.flatten(0, 1)
            numbered = every[plan.order]
        had = numbered[:, self._sums : self._width].sum(0).tolist() if self._optional else None
        views = self._flats[total][1]
        for i, (parameter, gradient) in enumerate(zip(self._parameters, views, strict=True)):
            parameter.grad = gradient if had is None or had[i] else None
        sums = numbered[:, : self._sums].sum(0)
        sums[WISHED] = every[:, WISHED].sum(0)  # those that ride in an empty micro-batch too
        self.statistics.fold(numbered[:, self._width :])
        if (spoilt := self._buffers.spoilt(self.shared)) is not None:  # alike on all ranks
            sums[0] += spoilt  # also by a micro-batch before the last
        self._objective.swap_sums(sums.tolist() if self._on_host else sums)

    def _add_up(self) -> int:
        """Collective. The sums of this rank's slice; then the slices of all."""
        result = self._sent[0] if self._sent else self._flat()
        home = self._flats[result][0]
        first, end = own = self._slices[self._rank]
        target = home[first:end]

        def join(left: Tensor, right: Tensor) -> Tensor:
            out = right if right.data_ptr() == target.data_ptr() else left
            for a, b, c in zip(*(self._layout.numbers(t, own) for t in (left, right, out)),
                               strict=True):
                torch.add(a, b, out=c)
            return out

        fold = Fold(self._now.leaves, join)
        for rank, spans in enumerate(self._now.spans):
            for number, span in enumerate(spans):
                fold.push(span, self._piece(rank, number) if rank != self._rank else
                          self._flats[self._sent[number]][0][first:end])
        (_, total), = fold.parts
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)
        if not self._whole:
            self._exchange([(target, rank) for rank in range(self._size)],
                           [(home[a:b], rank) for rank, (a, b) in enumerate(self._slices)])
            self.wait_for_peers()
        return result

    def _piece(self, rank: int, number: int) -> Tensor:
        """What another rank's partial sum of a round adds to this rank's slice."""
        key = (rank, number, self._whole)
        if key not in self._pieces:
            self._pieces[key] = self._layout.buffer(self._slices[self._rank])
        return self._pieces[key]


def reduce(step: Step, world: World, windows: Windows, find_unused: OnOff) -> None:
    """Collective. Make a step's sums canonical; ranks begin with the weights of rank 0."""
    world.broadcast([*step.model.parameters(), *step.model.buffers()])
    reduction = Reduction(step, world, windows, optional=find_unused == "on")
    step.reduction, step.shared = reduction, reduction.shared
