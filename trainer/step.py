"""One optimizer step over the numbered micro-batches of a global batch, in the canonical order."""

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

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.checkpoint.progress import TrainProgress
from trainer.config.schema import Clip
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.comm_timer import CommunicationTimer, DeviceInterval
from trainer.distributed.ddp import COUNT, Objective, StepSums, check_reduced
from trainer.distributed.sync_batchnorm import SyncBatchNorm
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.optim.bad_step_check import BAD_REASONS, EXCLUDED, Health
from trainer.optim.ema import Ema
from trainer.optim.optimizers import clip
from trainer.resilience.progress_marks import ProgressMarks
from trainer.telemetry.status import Phase, Status


class StepResult(NamedTuple):
    """Result of a step. Equal on all ranks, except times."""

    step: int
    epoch: int
    sums: StepSums
    lrs: tuple[float, ...]
    """Learning rates of this step's update, one per parameter group."""
    grad_norm: float
    """Global norm of the mean gradient before clipping."""
    scale: float | None
    """Loss scale of this step (fp16)."""
    skip_reason: str
    """Why the update was skipped (see `bad_step_check`); "" if it was applied."""
    seconds: float
    device_s: float | None
    """Seconds from zero_grad to clip on the device's timeline (CUDA only)."""
    communication_s: float = 0.0
    """Estimated seconds that this rank waited for other ranks (see `communication`)."""
    save_stall_s: float = 0.0
    """Seconds that the update waited for a save to copy the state."""

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    @property
    def loss(self) -> float | None:
        """Mean loss over the global batch; None for a skipped update."""
        return None if self.skipped else self.sums.loss / self.sums.count


NOTHING = contextlib.nullcontext()
UPDATE = -2
"""Number that keys the randomness of the update, in place of a micro-batch's number."""


class Requests(Protocol):
    """Returns a rank's requests of all ranks; called as late as possible in a step."""

    def __call__(self) -> tuple[bool, ...]:
        """Return a value for each member of `ddp.REQUESTS`."""
        ...


def no_requests() -> tuple[bool, ...]:
    """Request nothing."""
    return ()


@dataclass
class Step:
    """Computes one optimizer step per call.

    Args:
        objective: module whose forward returns the loss.
        wrapped: the objective, under DDP if there are several ranks.
        model: the plain model.
        autocast: factory of contexts for the forward.
        nominal_count: expected count of a global batch, the divisor of its loss.
    """

    objective: Objective
    wrapped: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    clip: Clip
    progress: TrainProgress
    seed: int
    num_ranks: int
    nominal_count: float
    marks: ProgressMarks
    broadcast: Callable[[Sequence[Tensor], int], None]
    health: Health
    local_buffers: list[Tensor] = field(default_factory=list)
    """Buffers that the forward changes on each rank separately. The last rank's are broadcast."""
    replicated_buffers: Container[Tensor] = frozenset()
    """All buffers that the forward changes: equal on all ranks at a step boundary."""
    before_update: Callable[[], None] = lambda: None
    """Called before parameters and optimizer state change."""
    ema: Ema | None = None
    nan_detector: Callable[[MicroBatchSpec], contextlib.AbstractContextManager[None]] | None = None
    """Factory of contexts that detect the origin of a NaN."""
    reduction: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]] = iter
    """Wraps the micro-batches of a step. After the last one, gradients and sums are those of all
    ranks. The default leaves the reduction to DDP."""
    shared: Container[Tensor] = ()
    """Buffers that are equal on all ranks after `reduction`."""
    min_samples: int = 0
    """Minimum number of samples in a window. A window at the end of a stream's epoch may have
    fewer; it gives no step."""
    all_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """Adds up a tensor over the ranks, in place."""
    status: Status = field(default_factory=Status)
    """Notified when a step and its update begin and end."""
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.trained = [n for n, p in self.wrapped.named_parameters() if p.requires_grad]
        """Names of the trained parameters, in the order of DDP's indices."""
        self.no_sync = (self.wrapped.no_sync if isinstance(self.wrapped, DistributedDataParallel)
                        else None)
        """DDP's context for forward *and* backward of micro-batches that are not the last."""
        self.own_update = type(self.optimizer) not in (torch.optim.AdamW, torch.optim.SGD)
        self.key = rng.mix(self.seed, rng.MICRO)
        self.generators = rng.find_generators(*self.model.modules(), self.objective.loss)
        """Random generators inside the model and the loss."""
        self.on_device = self.parameters[0].device.type != "cpu"
        self.buffers = Buffers(self.model)
        self.waiting = waiting_for(WaitsFor.PEERS)
        self.device_span = DeviceInterval(on_cuda=self.parameters[0].is_cuda)
        self.communication = CommunicationTimer(on_cuda=self.parameters[0].is_cuda)
        for module in self.model.modules():
            if isinstance(module, SyncBatchNorm):
                module.communication = self.communication
        self.mutates_batch = False
        """Whether the loss changes its batch, whose memory may belong to the data set."""
        self.moves_parameters = False
        """Whether the forward changes parameters on some rank. Within a step they are then not
        those of the last step boundary."""
        self.boundary_lock = threading.Lock()
        """Free from the beginning of a step to its update. While it is free, parameters, optimizer,
        progress and the copies of buffers are those of the last step boundary, and another thread
        that takes the lock may save them."""
        self.boundary_lock.acquire()
        self.holds_boundary_lock = True
        """Whether the main thread holds `boundary_lock`."""
        self.boundary = torch.cuda.Event() if self.parameters[0].is_cuda else None
        """Recorded on the device at the last step boundary."""

    def __call__(
        self, micro_batches: Iterable[MicroBatch], *, requests: Requests = no_requests
    ) -> StepResult | None:
        """Collective. Consume the next global batch, and apply or skip the update of the weights.

        Args:
            micro_batches: those of this rank; the last one has `spec.last`.
            requests: returns this rank's requests of all ranks.

        Returns None, on all ranks, if the window had fewer samples than `min_samples`.
        """
        start, step = self.clock(), self.progress.step + 1
        if step in self.progress.excluded_steps:
            return self.skip_batch(micro_batches, step)
        self._begin()
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self.reduction(micro_batches):
            epoch = micro.spec.epoch
            with NOTHING if self.nan_detector is None else self.nan_detector(micro.spec):
                self.forward_backward(micro, requests=requests)
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        vector = self.objective.take_sums(self.num_ranks, scale or 1.0)
        self.scaler.unscale_(self.optimizer)
        self.to_mean(vector[COUNT])
        grad_norm = clip(self.parameters, self.clip)
        self.device_span.second()
        sums, norm = self.objective.read_sums(vector, grad_norm)  # waits for the device
        if sums.samples < self.min_samples:
            self.discard_window()
            return None
        lrs = tuple([float(group["lr"]) for group in self.optimizer.param_groups])
        self.buffers.restore_storage()
        # All values are reduced, so all ranks reach the same decision.
        skip_reason = self.health.reason_to_skip(
            loss=sums.loss, count=sums.count, norm=norm, scale=scale)
        self._broadcast_buffers()  # the last collective of the step
        self.holds_boundary_lock = self.boundary_lock.acquire()
        self.marks.mark(Phase.OPTIMIZER, step, epoch)
        save_stall_s = 0.0 if skip_reason else self._prepare_update(step)
        if not skip_reason:
            self.status.begin_update()
            self.scaler.step(self.optimizer)
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
            self.health.remember(loss=sums.loss, count=sums.count)
        else:
            self.buffers.put_back()
            self.status.begin_update()
            self.progress.note_skipped(step, bad=skip_reason in BAD_REASONS)
        self.scaler.update()
        self.progress.replaced += sums.replaced
        self.progress.step = step
        self.status.end_step()
        self.marks.mark(Phase.STEP_END, step, epoch)
        seconds = self.clock() - start
        return StepResult(
            step=step, epoch=epoch, sums=sums, lrs=lrs, grad_norm=norm, scale=scale,
            skip_reason=skip_reason, seconds=seconds, device_s=self.device_span.between_s(),
            save_stall_s=save_stall_s, communication_s=self.communication.take_wait_s())

    def _begin(self) -> None:
        """Copy the buffers of the step boundary, and let other threads save the boundary."""
        self.device_span.first()
        self.buffers.keep()
        self.status.begin_step()  # not before `keep`: an error would restore older buffers
        if self.boundary is not None:
            self.boundary.record()
        if self.holds_boundary_lock:
            self.holds_boundary_lock = False
            self.boundary_lock.release()

    def _broadcast_buffers(self) -> None:
        """Collective. Make buffers equal on all ranks that the forward changes on each rank.

        The last rank is the source: it has an empty micro-batch only at the end of a stream's
        epoch. No collective follows in the step, so a rank that loses a peer has applied either
        the whole update or nothing of it.
        """
        if self.local_buffers:
            self.broadcast(self.local_buffers, self.num_ranks - 1)

    def _prepare_update(self, step: int) -> float:
        """Wait for a save to copy the state, and key the randomness of the update.

        Returns:
            seconds of waiting.
        """
        save_stall_s = -self.clock()
        self.before_update()
        save_stall_s += self.clock()
        if self.own_update:  # the key is equal on all ranks
            rng.seed_all(step, UPDATE, state=self.key, devices=self.on_device)
        return save_stall_s

    def forward_backward(
        self, micro: MicroBatch, *, requests: Requests = no_requests, rehearsal: bool = False
    ) -> None:
        """Collective. Compute forward and backward of a micro-batch; reduce after the last one.

        Args:
            rehearsal: the computation is not part of a step; nothing is injected.
        """
        spec = micro.spec
        if self.mutates_batch:
            micro = replace(micro, batch=batches.copy_of(micro.batch))
        mark = self.marks.mark if not rehearsal else self.marks.rehearse
        mark(Phase.FORWARD, spec.step, spec.epoch)
        rng.seed_all(spec.step, spec.number, state=self.key, devices=self.on_device)
        if self.generators:
            rng.key(self.generators, self.seed, rng.MICRO, spec.step, spec.number)
        accumulating = NOTHING if spec.last or self.no_sync is None else self.no_sync()
        with accumulating:
            with self.autocast():
                loss = self.wrapped(micro.batch, micro.samples,
                                    requests() if spec.last else None, len(micro.replaced))
            mark(Phase.BACKWARD, spec.step, spec.epoch)
            reduced = spec.last and self.num_ranks > 1
            if reduced:
                self.communication.time_backward(loss)
            with self.waiting if reduced else NOTHING:
                self.scaler.scale(loss).backward()
        if spec.last and self.num_ranks > 1:
            check_reduced(self.wrapped, spec, self.trained)
            self.communication.end_backward()

    def skip_batch(self, micro_batches: Iterable[MicroBatch], step: int) -> StepResult | None:
        """Consume an excluded global batch without any computation. Collective for a stream.

        Returns:
            None, on all ranks, if the window had fewer samples than `min_samples`.
        """
        start, samples = self.clock(), 0
        for micro in micro_batches:
            epoch, samples = micro.spec.epoch, samples + micro.samples
        if self.min_samples and self.all_sum(torch.tensor(samples)) < self.min_samples:
            return None
        self.progress.note_skipped(step)
        self.progress.step = step
        return StepResult(
            step=step, epoch=epoch, sums=StepSums.empty(), skip_reason=EXCLUDED, grad_norm=math.nan,
            lrs=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            seconds=self.clock() - start, device_s=None,
        )  # fmt: skip

    def side_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which another thread that holds `boundary_lock` reads the state of the last
        boundary.

        On a GPU this is a side stream that waits only for the work before that boundary.
        """
        if self.boundary is None:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self.parameters[0].device)
        stream.wait_event(self.boundary)
        return torch.cuda.stream(stream)

    def discard_window(self) -> None:
        """Undo a window that gives no step: buffers, and the scaler's record of its gradients."""
        self.holds_boundary_lock = self.boundary_lock.acquire()
        self.buffers.put_back()
        kept = self.scaler.state_dict()
        self.scaler.update()
        self.scaler.load_state_dict(kept)

    def to_mean(self, count: Tensor | float) -> None:
        """Scale the gradients to those of the mean over the actual count."""
        on_device = isinstance(count, Tensor) and count.device.type != "cpu"
        if not on_device and float(count) == self.nominal_count:
            return
        if count == 0 and not on_device:
            count = math.nan  # avoids a division by 0; the update is skipped
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, self.nominal_count / count)
