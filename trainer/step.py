"""One optimizer step: the canonical order, over the numbered micro-batches of a global batch."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import generators, rng
from trainer.adamw import AdamW
from trainer.buffers import Buffers
from trainer.communication import Communication, Marks
from trainer.config import Clip
from trainer.data import batch as batches
from trainer.data.reading import Micro
from trainer.data.sampler import Slot
from trainer.ema import Ema
from trainer.health import BAD, LEFT_OUT, Health
from trainer.optim import clip, zero_grad
from trainer.parallel import COUNT, Objective, Sums
from trainer.progress import Progress
from trainer.pulse import ProgressMarks
from trainer.reduced import check_reduced
from trainer.status import Phase, Status
from trainer.sync_batchnorm import SyncBatchNorm
from trainer.waits import WaitsFor, waiting_for


class StepResult(NamedTuple):
    """What a step came to. All but `seconds` is equal on all ranks."""

    step: int
    epoch: int
    sums: Sums
    lrs: tuple[float, ...]
    """The rates that this step's update used, one a parameter group."""
    grad_norm: float
    """Global norm of the mean gradient before clipping."""
    scale: float | None
    """fp16: the loss scale that this step used."""
    fault: str
    """Why the update was left out (see `health`), "" if it wasn't."""
    seconds: float
    device_s: float | None
    """CUDA: seconds from zero_grad to clip on the device's own time line."""
    communication_s: float = 0.0
    """Seconds that this rank waited for the others: an estimate (see `communication`)."""
    held_s: float = 0.0
    """Seconds that the update waited for the copy of a save."""

    @property
    def skipped(self) -> bool:
        """Whether the update was left out."""
        return bool(self.fault)

    @property
    def loss(self) -> float | None:
        """Mean loss over the global batch; None for a skipped update."""
        return None if self.skipped else self.sums.loss / self.sums.count


NOTHING = contextlib.nullcontext()
UPDATE = -2
"""The update's number among those of the micro-batches, as a key of randomness."""


class Wishes(Protocol):
    """What a rank wants to happen after the step, looked at as late as possible in it."""

    def __call__(self) -> tuple[bool, ...]:
        """One truth value for each of `parallel.WISHES`."""
        ...


def no_wishes() -> tuple[bool, ...]:
    """Nothing is wanted."""
    return ()


@dataclass
class Step:
    """The parts of a step, and the step itself when called.

    Args:
        objective: the module whose forward is the loss.
        wrapped: the objective under DDP, or itself.
        model: the plain model, whose buffers a skipped update puts back.
        autocast: makes the context for forwards.
    """

    objective: Objective
    wrapped: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    clip: Clip
    progress: Progress
    seed: int
    num_ranks: int
    nominal_count: float
    marks: ProgressMarks
    broadcast: Callable[[Sequence[Tensor], int], None]
    health: Health
    moving: list[Tensor] = field(default_factory=list)
    """Buffers that the forward moves and that ranks don't share: the last rank's are taken."""
    kept_equal: Container[Tensor] = frozenset()
    """Those, and the ones that ranks do share: equal on all ranks at a boundary."""
    before_update: Callable[[], None] = lambda: None
    """Called before parameters and optimizer state change."""
    ema: Ema | None = None
    hunt: Callable[[Slot], contextlib.AbstractContextManager[None]] | None = None
    """Makes the context that looks for what makes a NaN."""
    reduction: Callable[[Iterable[Micro]], Iterable[Micro]] = iter
    """Goes over the micro-batches of a step; after the last, gradients and sums are those of all
    ranks, where DDP doesn't see to it."""
    shared: Container[Tensor] = ()
    """Buffers that are equal on all ranks after `reduction`."""
    least_samples: int = 0
    """Samples that a window must have to count; it hasn't where the epoch of a stream ends."""
    all_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Adds a tensor over the ranks, in place."""
    status: Status = field(default_factory=Status)
    """Learns when a step and its update begin and end."""
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.trained = [n for n, p in self.wrapped.named_parameters() if p.requires_grad]
        """In the order in which DDP counts them."""
        self.no_sync = (self.wrapped.no_sync if isinstance(self.wrapped, DistributedDataParallel)
                        else None)
        """DDP's context around forward *and* backward of a micro-batch whose gradients wait."""
        self.own_update = type(self.optimizer) not in (AdamW, torch.optim.AdamW, torch.optim.SGD)
        self.key = rng.mix(self.seed, rng.MICRO)
        self.generators = generators.kept_by(*self.model.modules(), self.objective.loss)
        """Those that the model and the loss keep for themselves."""
        self.on_device = self.parameters[0].device.type != "cpu"
        self.buffers = Buffers(self.model)
        self.waiting = waiting_for(WaitsFor.PEERS)
        self.device_span = Marks(on_cuda=self.parameters[0].is_cuda)
        self.communication = Communication(ranks=self.num_ranks,
                                           on_cuda=self.parameters[0].is_cuda)
        for module in self.model.modules():
            if isinstance(module, SyncBatchNorm):
                module.communication = self.communication
        self.in_place = False
        """Whether the loss changes its batch, which the data set may have handed out of its own."""
        self.moves_parameters = False
        """Whether the forward of some rank moves parameters: then only at a boundary are they the
        boundary's."""
        self.gate = threading.Lock()
        """Open from a step's beginning to its update: parameters, optimizer and all facts are
        those of the last boundary, and the buffers' copies too."""
        self.gate.acquire()
        self.shut = True
        """Whether the main thread itself holds the gate."""
        self.boundary = torch.cuda.Event() if self.parameters[0].is_cuda else None
        """When the device has come to the last boundary."""

    def __call__(
        self, micro_batches: Iterable[Micro], *, wishes: Wishes = no_wishes
    ) -> StepResult | None:
        """Consume the next global batch and, unless something speaks against it, update the
        weights.

        Collective.

        Args:
            micro_batches: this rank's, the last one with `slot.last`.
            wishes: this rank's wishes for after the step; they ride to all ranks.

        Returns:
            None, on all ranks, if the window had fewer than `least_samples`: no step was made.
        """
        start, step, mark = self.clock(), self.progress.step + 1, self.marks.mark
        if step in self.progress.left_out:
            return self.leave_out(micro_batches, step)
        self.device_span.first()
        self.buffers.keep()
        self.status.begin_step()  # not before: an error would bring back the last step's buffers
        if self.boundary is not None:
            self.boundary.record()
        if self.shut:
            self.shut = False
            self.gate.release()
        zero_grad(self.optimizer, self.parameters)
        for micro in self.reduction(micro_batches):
            epoch = micro.slot.epoch
            if self.hunt is None:
                self.forward_backward(micro, wishes=wishes)
            else:
                with self.hunt(micro.slot):
                    self.forward_backward(micro, wishes=wishes)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        vector = self.objective.take_sums(self.num_ranks, scale or 1.0)
        self.scaler.unscale_(self.optimizer)
        self.to_mean(vector[COUNT])
        grad_norm = clip(self.parameters, self.clip)
        self.device_span.second()
        sums, norm = self.objective.read_sums(vector, grad_norm)  # waits for the device
        if sums.samples < self.least_samples:
            self.shut = self.gate.acquire()
            self.leave_no_trace()
            return None
        lrs = tuple([float(group["lr"]) for group in self.optimizer.param_groups])
        self.buffers.bring_home()
        # All are reduced values, so all ranks decide alike.
        fault = self.health.judge(loss=sums.loss, count=sums.count, norm=norm, scale=scale)
        if self.moving:
            # The last rank has no empty micro-batch but where a stream's epoch ends. No collective
            # comes after it: a rank that loses a peer in a step has either made its update, or has
            # nothing of it.
            self.broadcast(self.moving, self.num_ranks - 1)
        self.shut = self.gate.acquire()
        mark(Phase.OPTIMIZER, step, epoch)
        held_s = 0.0
        if not fault:
            held_s = -self.clock()
            self.before_update()
            held_s += self.clock()
            if self.own_update:  # the same on all ranks
                rng.key_generators(step, UPDATE, state=self.key, devices=self.on_device)
            self.status.begin_update()
            self.scaler.step(self.optimizer)
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
            self.health.remember(loss=sums.loss, count=sums.count)
        else:
            self.buffers.put_back()
            self.status.begin_update()
            self.progress.note_skipped(step, bad=fault in BAD)
        self.scaler.update()
        self.progress.replaced += sums.replaced
        self.progress.step = step
        self.status.end_step()
        mark(Phase.STEP_END, step, epoch)
        seconds = self.clock() - start
        return StepResult(
            step=step, epoch=epoch, sums=sums, lrs=lrs, grad_norm=norm, scale=scale,
            fault=fault, seconds=seconds, device_s=self.device_span.between_s(), held_s=held_s,
            communication_s=self.communication.take(seconds),
        )  # fmt: skip

    def forward_backward(
        self, micro: Micro, *, wishes: Wishes = no_wishes, rehearsal: bool = False
    ) -> None:
        """Forward and backward of one micro-batch; the last one's gradients are all-reduced.

        Collective.

        Args:
            rehearsal: not part of a step; no fault is injected.
        """
        slot = micro.slot
        if self.in_place:
            micro = replace(micro, batch=batches.copy_of(micro.batch))
        mark = self.marks.mark if not rehearsal else self.marks.rehearse
        mark(Phase.FORWARD, slot.step, slot.epoch)
        rng.key_generators(slot.step, slot.number, state=self.key, devices=self.on_device)
        if self.generators:
            generators.key(self.generators, self.seed, rng.MICRO, slot.step, slot.number)
        accumulating = NOTHING if slot.last or self.no_sync is None else self.no_sync()
        with accumulating:
            with self.autocast():
                loss = self.wrapped(micro.batch, micro.samples,
                                    wishes() if slot.last else None, len(micro.replaced))
            mark(Phase.BACKWARD, slot.step, slot.epoch)
            reduced = slot.last and self.num_ranks > 1
            if reduced:
                self.communication.watch(loss)
            with self.waiting if reduced else NOTHING:
                self.scaler.scale(loss).backward(self.objective.grad_outputs.get(loss.dtype))
        if slot.last and self.num_ranks > 1:
            check_reduced(self.wrapped, slot, self.trained)
            self.communication.reduced()

    def leave_out(self, micro_batches: Iterable[Micro], step: int) -> StepResult | None:
        """Consume a global batch without computing anything with it.

        Collective, of a stream; None as for a step that is made.
        """
        start, samples = self.clock(), 0
        for micro in micro_batches:
            epoch, samples = micro.slot.epoch, samples + micro.samples
        if self.least_samples and self.all_sum(torch.tensor(samples)) < self.least_samples:
            return None
        self.progress.note_skipped(step)
        self.progress.step = step
        return StepResult(
            step=step, epoch=epoch, sums=Sums.nothing(), fault=LEFT_OUT, grad_norm=math.nan,
            lrs=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            seconds=self.clock() - start, device_s=None,
        )  # fmt: skip

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Where another thread may read the state of the last boundary while the gate is open: on
        a GPU a stream of its own, which waits for that boundary alone."""
        if self.boundary is None:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self.parameters[0].device)
        stream.wait_event(self.boundary)
        return torch.cuda.stream(stream)

    def leave_no_trace(self) -> None:
        """Undo a window that doesn't count: buffers, and what the scaler noted of its gradients."""
        self.buffers.put_back()
        kept = self.scaler.state_dict()
        self.scaler.update()
        self.scaler.load_state_dict(kept)

    def to_mean(self, count: Tensor | float) -> None:
        """Make the gradients those of the mean over what was really counted."""
        on_device = isinstance(count, Tensor) and count.device.type != "cpu"
        if not on_device and float(count) == self.nominal_count:
            return
        if count == 0 and not on_device:
            count = math.nan  # no number to divide by; the step is left out
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, self.nominal_count / count)
