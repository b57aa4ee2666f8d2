"""One optimizer step over the numbered micro-batches of a global batch, in the canonical order."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import rng
from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.train_state import TrainState
from trainer.config.schema import BadStepConfig, Clip
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed import stand_in
from trainer.distributed.comm_timer import CommunicationTimer, DeviceInterval
from trainer.distributed.ddp import COUNT, Objective, StepSums, check_reduced
from trainer.distributed.sync_batchnorm import SyncBatchNorm
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import LaunchInfo, World
from trainer.optim.bad_step_check import BAD_REASONS, EXCLUDED, Health
from trainer.optim.optimizers import clip
from trainer.resilience.progress_marks import ProgressMarks
from trainer.telemetry.status import Phase, Status


class StepResult(NamedTuple):
    """Result of a step. Equal on all ranks, except times."""

    step: int
    epoch: int
    sums: StepSums
    lrs: tuple[float, ...]
    """Of this step's update, one per parameter group."""
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
    """Estimated seconds that this rank waited for other ranks."""

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

Requests = Callable[[], tuple[bool, ...]]
"""Returns what this rank asks all ranks to do, for each of `ddp.REQUESTS`; called as late as
possible in a step."""

Reduction = Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]]
"""Wraps the micro-batches of a step. After the last one, gradients and sums are those of all
ranks."""


def no_requests() -> tuple[bool, ...]:
    """Request nothing."""
    return ()


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the warm-up has found out about the model and the loss."""

    mutates_batch: bool = False
    """The loss changes its batch, whose memory may belong to the data set."""
    moves_parameters: bool = False
    """The forward changes parameters: within a step they aren't those of the last boundary."""
    activations_mb: float | None = None
    """MiB saved for the backward of one micro-batch; None if unknown."""


class ForwardBackward:
    """Forward and backward of single micro-batches: in a step, in the warm-up, in a diagnosis.
    `wrapped` is the objective, under DDP if there are several ranks."""

    def __init__(
        self, objective: Objective, wrapped: nn.Module, state: TrainState, marks: ProgressMarks,
        autocast: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.objective, self.wrapped, self.model = objective, wrapped, objective.model
        self.autocast, self.marks, self.num_ranks = autocast, marks, state.num_ranks
        self.parameters = [p for g in state.optimizer.param_groups for p in g["params"]]
        self.communication = CommunicationTimer(on_cuda=self.parameters[0].is_cuda)
        self._seed, self._key = state.seed, rng.mix(state.seed, rng.MICRO)
        self._scaler = state.scaler
        self._generators = rng.find_generators(*self.model.modules(), objective.loss)
        self._on_device = self.parameters[0].device.type != "cpu"
        self._leaves = [p for p in objective.parameters() if p is not objective.stats_carrier]
        self._trained = [n for n, p in wrapped.named_parameters() if p.requires_grad]
        self._no_sync = wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else None
        self._waiting = waiting_for(WaitsFor.PEERS)
        for module in self.model.modules():
            if isinstance(module, SyncBatchNorm) and not self._on_device:
                module.measure_with(self.communication)

    def __call__(
        self, micro: MicroBatch, *, requests: Requests = no_requests, rehearsal: bool = False
    ) -> None:
        """Collective. Compute a micro-batch; reduce after the last one of a step. A `rehearsal` is
        not part of a step; nothing is injected in it."""
        spec = micro.spec
        mark = self.marks.mark if not rehearsal else self.marks.rehearse
        mark(Phase.FORWARD, spec.step, spec.epoch)
        rng.seed_all(spec.step, spec.number, state=self._key, devices=self._on_device)
        if self._generators:
            rng.key(self._generators, self._seed, rng.MICRO, spec.step, spec.number)
        counts = micro.samples > 0
        # DDP's no_sync must enclose forward *and* backward of all micro-batches but the last.
        with (NOTHING if spec.last or self._no_sync is None else self._no_sync(),
              NOTHING if counts else stand_in.forward_and_backward(self.model)):
            with self.autocast():
                loss = self.wrapped(micro.batch, micro.samples,
                                    requests() if spec.last else None, len(micro.replaced))
            mark(Phase.BACKWARD, spec.step, spec.epoch)
            reduced = spec.last and self.num_ranks > 1
            if reduced:
                self.communication.time_backward(loss)
            with (self._waiting if reduced else NOTHING,
                  NOTHING if counts else stand_in.zero_gradients(self._leaves)):
                self._scaler.scale(loss).backward(self.objective.gradients.get(loss.dtype))
        if reduced:
            check_reduced(self.wrapped, spec, self._trained)
            self.communication.end_backward()


@dataclass(kw_only=True)
class Step:
    """Computes one optimizer step per call."""

    compute: ForwardBackward
    state: TrainState
    boundary: StepBoundary
    facts: ModelFacts
    world: World
    health: Health
    clip: Clip
    status: Status
    """Notified when a step and its update begin and end."""
    reduction: Reduction = iter
    """The default leaves the reduction to DDP."""
    nan_detector: Callable[[MicroBatchSpec], contextlib.AbstractContextManager[None]] | None = None
    min_samples: int = 0
    """A window with fewer samples, at the end of a stream's epoch, gives no step."""

    def __post_init__(self) -> None:
        state, compute = self.state, self.compute
        self.optimizer, self.schedule, self.scaler = state.optimizer, state.schedule, state.scaler
        self.progress, self.ema = state.progress, state.ema
        self.objective, self.parameters = compute.objective, compute.parameters
        self.num_ranks = compute.num_ranks
        self.own_update = type(self.optimizer) not in (torch.optim.AdamW, torch.optim.SGD)
        """Whether the optimizer's class is the user's, whose update may draw random numbers."""
        self._waiting_for_device = waiting_for(WaitsFor.DEVICE)
        self._device_span = DeviceInterval(on_cuda=self.parameters[0].is_cuda)

    @classmethod
    def plain(
        cls, state: TrainState, objective: Objective, wrapped: nn.Module, clip: Clip | None = None
    ) -> Step:
        """A step outside of a run: without warm-up, mixed precision and saves."""
        compute = ForwardBackward(objective, wrapped, state, ProgressMarks(),
                                  contextlib.nullcontext)
        status = Status()
        return cls(
            compute=compute, state=state, boundary=StepBoundary(objective.model, status),
            facts=ModelFacts(), world=World(LaunchInfo(), torch.device("cpu"), 1),
            health=Health(BadStepConfig()), clip=clip or Clip(), status=status)

    def __call__(
        self, micro_batches: Iterable[MicroBatch], *, requests: Requests = no_requests
    ) -> StepResult | None:
        """Collective. Consume this rank's micro-batches of the next global batch, the last of which
        has `spec.last`, and apply or skip the update of the weights. Returns None, on all ranks, if
        the window had fewer samples than `min_samples`."""
        start, step = time.perf_counter(), self.progress.step + 1
        if step in self.progress.excluded_steps:
            return self._skip_batch(micro_batches, step)
        self._device_span.first()
        self.boundary.begin_step()
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self.reduction(micro_batches):
            epoch = micro.spec.epoch
            detector = self.nan_detector if micro.samples else None
            with NOTHING if detector is None else detector(micro.spec):
                self.forward_backward(micro, requests=requests)
        loss_scale = self._loss_scale()
        vector = self.objective.take_sums(self.num_ranks, loss_scale)
        self.scaler.unscale_(self.optimizer)
        self._to_mean(vector[COUNT])
        grad_norm = clip(self.parameters, self.clip)
        self._device_span.second()
        with self._waiting_for_device:
            sums, norm, scale = self.objective.read_sums(vector, grad_norm, loss_scale)
        if sums.samples < self.min_samples:
            self._discard_window()
            return None
        lrs = self._lrs()
        sums = self._synchronize_buffers(sums)  # the last collective of the step
        # All values are reduced, so all ranks reach the same decision.
        skip_reason = self.health.reason_to_skip(
            loss=sums.loss, count=sums.count, norm=norm, scale=scale)
        self.boundary.close()
        self.compute.marks.mark(Phase.OPTIMIZER, step, epoch)
        self.status.begin_update()
        if not skip_reason:
            self._key_update(step)
            self.optimizer.step()  # `scaler.step` would read from the device what `norm` tells
            self.schedule.step()
            if self.ema is not None:
                self.ema.update()
            self.health.remember(loss=sums.loss, count=sums.count)
        else:
            self.boundary.buffers.put_back()
            self.progress.note_skipped(step, bad=skip_reason in BAD_REASONS)
        self.scaler.update()
        self.progress.complete(step, replaced=sums.replaced)
        self.status.end_step()
        self.compute.marks.mark(Phase.STEP_END, step, epoch)
        seconds = time.perf_counter() - start
        return StepResult(
            step=step, epoch=epoch, sums=sums, lrs=lrs, grad_norm=norm, scale=scale,
            skip_reason=skip_reason, seconds=seconds, device_s=self._device_span.between_s(),
            communication_s=self.compute.communication.take_wait_s())

    def forward_backward(
        self, micro: MicroBatch, *, requests: Requests = no_requests, rehearsal: bool = False
    ) -> None:
        """Collective. See `ForwardBackward`; the batch is copied if the loss changes it."""
        if self.facts.mutates_batch:
            micro = replace(micro, batch=batches.copy_of(micro.batch))
        self.compute(micro, requests=requests, rehearsal=rehearsal)

    def _synchronize_buffers(self, sums: StepSums) -> StepSums:
        """Collective. Make buffers equal on all ranks that each rank changes on its own. No
        collective follows in the step, so a rank that loses a peer has applied either the whole
        update or nothing of it. Returns the sums, with the loss NaN if a buffer isn't finite."""
        buffers = self.boundary.buffers
        buffers.restore_storage()
        if "buffers" in sums.requests and buffers.agree(self.world):
            sums = replace(sums, loss=math.nan)
        if buffers.broadcast(self.world):
            with self._waiting_for_device:
                self.boundary.wait_for_device()
        return sums

    def _key_update(self, step: int) -> None:
        """Key the randomness of the update of a user's optimizer, equally on all ranks."""
        if self.own_update:
            rng.seed_all(step, UPDATE, state=rng.mix(self.state.seed, rng.MICRO),
                         devices=self.parameters[0].device.type != "cpu")

    def _skip_batch(self, micro_batches: Iterable[MicroBatch], step: int) -> StepResult | None:
        """Consume an excluded global batch without any computation. Collective for a stream."""
        start, samples, scale = time.perf_counter(), 0, self._loss_scale()
        for micro in micro_batches:
            epoch, samples = micro.spec.epoch, samples + micro.samples
        if self.min_samples and self.world.all_sum(torch.tensor(samples)) < self.min_samples:
            return None
        self.progress.note_skipped(step)
        self.progress.complete(step)
        return StepResult(
            step=step, epoch=epoch, sums=StepSums.empty(), skip_reason=EXCLUDED, grad_norm=math.nan,
            lrs=self._lrs(), scale=None if scale is None else float(scale),
            seconds=time.perf_counter() - start, device_s=None)

    def _loss_scale(self) -> Tensor | None:
        """The factor of the loss in backward (fp16), on the device."""
        if not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self.parameters[0].device))

    def _lrs(self) -> tuple[float, ...]:
        return tuple([float(group["lr"]) for group in self.optimizer.param_groups])

    def _discard_window(self) -> None:
        """Undo a window that gives no step: buffers, and the scaler's record of its gradients."""
        self.boundary.close()
        self.boundary.buffers.put_back()
        kept = self.scaler.state_dict()
        self.scaler.update()
        self.scaler.load_state_dict(kept)

    def _to_mean(self, count: Tensor | float) -> None:
        """Scale the gradients to those of the mean over the actual count."""
        nominal_count = self.objective.nominal_count
        on_device = isinstance(count, Tensor) and count.device.type != "cpu"
        if not on_device and float(count) == nominal_count:
            return
        if not on_device and count == 0:
            count = math.nan  # avoids a division by 0; the update is skipped
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, nominal_count / count)
