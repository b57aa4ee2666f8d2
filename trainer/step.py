"""One optimizer step over the numbered micro-batches of a global batch, in the canonical order."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer import rng
from trainer.checkpoint.boundary import StepBoundary
from trainer.checkpoint.progress import EpochCalls
from trainer.checkpoint.train_state import TrainState
from trainer.config.schema import Clip
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed import stand_in
from trainer.distributed.comm_timer import CommunicationTimer, DeviceInterval
from trainer.distributed.ddp import COUNT, Objective, StepSums, check_reduced, no_marks
from trainer.distributed.sync_batchnorm import SyncBatchNorm
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.distributed.world import World
from trainer.optim.bad_step_check import BAD_REASONS, EXCLUDED, Health
from trainer.optim.named_optimizers import NamedOptimizers, fill_momentum, members_of
from trainer.optim.optimizers import FrozenAtFirst, clip
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
    turn: str = ""
    """The one of several optimizers that this step updates; "" if it updates everything."""
    optimizers: tuple[str, ...] = ()
    """Name of the optimizer of each parameter group, if there are several."""

    @property
    def skipped(self) -> bool:
        return bool(self.skip_reason)

    @property
    def loss(self) -> float | None:
        """Mean loss over the global batch; None for a skipped update."""
        return None if self.skipped else self.sums.loss / self.sums.count


NOTHING = contextlib.nullcontext()
UPDATE, AFTER_STEP = -2, -3
"""Numbers that key the randomness of the update and of `Task.after_step`, in place of a
micro-batch's number."""

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


class TurnParameters:
    """The parameters that the steps of a turn train ("": all). Inside `alone` the others need no
    gradient, so that its backward, and the reduction that is built there, leave them out; and
    `frozen` norms keep their statistics."""

    def __init__(self, optimizer: torch.optim.Optimizer, turn: str = "",
                 frozen: FrozenAtFirst | None = None) -> None:
        frozen = frozen or FrozenAtFirst()
        self.turn, self._norms, still = turn, frozen.norms, set(frozen.parameters)
        self.trained, self.others = list[Tensor](), list[Tensor]()
        self._shared, self._own = list[Tensor](), list[tuple[list[Tensor], Clip]]()
        for name, member in members_of(optimizer).items():
            mine = [p for p in member.parameters if turn in ("", name) and p not in still]
            self.trained += mine
            self.others += [p for p in member.parameters if turn not in ("", name) or p in still]
            if member.clip is None:
                self._shared += mine
            elif mine:
                self._own.append((mine, member.clip))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        for parameter in self.others:
            parameter.requires_grad_(False)
        for norm in self._norms:
            norm.eval()
        try:
            yield
        finally:
            for norm in self._norms:
                norm.train()
            for parameter in self.others:
                parameter.requires_grad_(True)

    def clip(self, config: Clip) -> Tensor:
        """Clip the gradients: those of an optimizer with limits of its own by themselves, all
        others together. Returns the global norm before, as `optimizers.clip`."""
        if not self._own:
            return clip(self.trained, config)
        norms = [clip(mine, own) for mine, own in self._own]
        norms += [clip(self._shared, config)] if self._shared else []
        return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


class ForwardBackward:
    """Forward and backward of single micro-batches: in a step, in the warm-up, in a diagnosis.
    `wrapped` is the objective, under DDP if there are several ranks; `reduction` leaves the
    reduction to DDP by default. With turns, there is one for each."""

    def __init__(
        self, objective: Objective, wrapped: nn.Module, state: TrainState, marks: ProgressMarks,
        autocast: Callable[[], contextlib.AbstractContextManager[None]], *,
        reduction: Reduction = iter, of: TurnParameters | None = None,
    ) -> None:
        self.objective, self.wrapped, self.model = objective, wrapped, objective.model
        self.autocast, self.marks, self.num_ranks = autocast, marks, state.num_ranks
        self.reduction, self.of = reduction, of or TurnParameters(state.optimizer)
        self.parameters, self.turn = self.of.trained, self.of.turn
        self.communication = CommunicationTimer(on_cuda=self.parameters[0].is_cuda)
        self._seed, self._key = state.seed, rng.mix(state.seed, rng.MICRO)
        self._scaler = state.scaler
        self._generators = rng.find_generators(*self.model.modules(), objective.loss)
        self.on_device = self.parameters[0].device.type != "cpu"
        self._leaves = [p for p in objective.parameters() if p is not objective.stats_carrier]
        others = set(self.of.others)
        self._trained = [n for n, p in wrapped.named_parameters()
                         if p.requires_grad and p not in others]
        self._no_sync = wrapped.no_sync if isinstance(wrapped, DistributedDataParallel) else None
        for module in self.model.modules():
            if isinstance(module, SyncBatchNorm) and not self.on_device:
                module.measure_with(self.communication)

    def __call__(
        self, micro: MicroBatch, *, requests: Requests = no_requests, rehearsal: bool = False
    ) -> None:
        """Collective. Compute a micro-batch; reduce after the last one of a step. A `rehearsal` is
        not part of a step; nothing is injected in it."""
        spec = micro.spec
        mark = self.marks.mark if not rehearsal else self.marks.rehearse
        mark(Phase.FORWARD, spec.step, spec.epoch)
        rng.seed_all(spec.step, spec.number, state=self._key, devices=self.on_device)
        if self._generators:
            rng.key(self._generators, self._seed, rng.MICRO, spec.step, spec.number)
        counts = micro.samples > 0
        # DDP's no_sync must enclose forward *and* backward of all micro-batches but the last.
        with (NOTHING if spec.last or self._no_sync is None else self._no_sync(),
              self.of.alone() if self.of.others else NOTHING,
              NOTHING if counts else stand_in.forward_and_backward(self.model)):
            with self.autocast():
                loss = self.wrapped(micro.batch, micro.samples,
                                    requests() if spec.last else None, len(micro.replaced))
            mark(Phase.BACKWARD, spec.step, spec.epoch)
            reduced = spec.last and self.num_ranks > 1
            if reduced:
                self.communication.time_backward(loss)
            with (waiting_for(WaitsFor.PEERS) if reduced else NOTHING,
                  NOTHING if counts else stand_in.zero_gradients(self._leaves),
                  no_marks(self._leaves) if rehearsal and not spec.last else NOTHING):
                self._scaler.scale(loss).backward(self.objective.gradients.get(loss.dtype))
        if reduced:
            check_reduced(self.wrapped, spec, self._trained)
            self.communication.end_backward()


@dataclass(frozen=True, kw_only=True)
class Computes:
    """How each step is computed."""

    turns: tuple[ForwardBackward, ...]
    """Those of the turns; one, if the task has none. Step 1 has the first turn."""
    at_first: tuple[ForwardBackward, ...] = ()
    """In their place up to the step `frozen_until`: they leave frozen parameters out."""
    frozen_until: int = 0

    def of_step(self, step: int) -> ForwardBackward:
        turns = self.at_first if step <= self.frozen_until else self.turns
        return turns[(step - 1) % len(turns)]

    @property
    def two_updates(self) -> int:
        """The step in which each turn has had two updates, if none is skipped."""
        return 2 * len(self.turns)

    def __iter__(self) -> Iterator[ForwardBackward]:
        """Each of them once."""
        return iter(dict.fromkeys((*self.at_first, *self.turns)))


@dataclass(kw_only=True)
class Step:
    """Computes one optimizer step per call."""

    computes: Computes
    state: TrainState
    boundary: StepBoundary
    facts: ModelFacts
    world: World
    health: Health
    clip: Clip
    status: Status
    """Notified when a step and its update begin and end."""
    nan_detector: Callable[[MicroBatchSpec], contextlib.AbstractContextManager[None]] | None = None
    after_step: Callable[[nn.Module, int], None] | None = None
    """That of the task."""
    trial: Callable[[int], None] | None = None
    """Called at the beginning of the step that follows two updates."""
    min_samples: int = 0
    """A window with fewer samples, at the end of a stream's epoch, gives no step."""

    def __post_init__(self) -> None:
        state = self.state
        self.optimizer, self.schedule, self.scaler = state.optimizer, state.schedule, state.scaler
        self.progress, self.ema = state.progress, state.ema
        self._take_turn(1)
        self.num_ranks = self.compute.num_ranks
        self.own_update = type(self.optimizer) not in (torch.optim.AdamW, torch.optim.SGD)
        """Whether the optimizer's class is the user's, whose update may draw random numbers."""
        self._epochs: EpochCalls | None = state.parts.get("epoch")
        self._own_generators = rng.find_generators(self.after_step) if self.after_step else []
        self._device_span = DeviceInterval(on_cuda=self.parameters[0].is_cuda)

    def __call__(
        self, micro_batches: Iterable[MicroBatch], *, requests: Requests = no_requests
    ) -> StepResult | None:
        """Collective. Consume this rank's micro-batches of the next global batch, the last of which
        has `spec.last`, and apply or skip the update of the weights. Returns None, on all ranks, if
        the window had fewer samples than `min_samples`."""
        start, step = time.perf_counter(), self.progress.step + 1
        if step in self.progress.excluded_steps:
            return self._skip_batch(micro_batches, step)
        self._take_turn(step)
        self._device_span.first()
        self.boundary.begin_step()
        self.optimizer.zero_grad(set_to_none=True)
        self._repeat_first_samples(step)
        for micro in self.compute.reduction(micro_batches):
            epoch = micro.spec.epoch
            if self._epochs is not None:
                self._epochs.enter(epoch)
            detector = self.nan_detector if micro.samples else None
            with NOTHING if detector is None else detector(micro.spec):
                self.forward_backward(micro, requests=requests)
        loss_scale = self._loss_scale()
        vector = self.objective.take_sums(self.num_ranks, loss_scale)
        self.scaler.unscale_(self.optimizer)
        self._to_mean(vector[COUNT])
        grad_norm = self.compute.of.clip(self.clip)
        self._device_span.second()
        with waiting_for(WaitsFor.DEVICE):
            sums, (norm, *scales) = self.objective.read_sums(
                vector, [grad_norm] if loss_scale is None else [grad_norm, loss_scale])
            scale = scales[0] if scales else None
        if sums.samples < self.min_samples:
            self._discard_window()
            return None
        lrs = self._lrs()
        sums = self._synchronize_buffers(sums)  # the last collective of the step
        # All values are reduced, so all ranks reach the same decision.
        skip_reason = self.health.reason_to_skip(
            loss=sums.loss, count=sums.count, norm=norm, scale=scale, turn=self.compute.turn)
        self.boundary.close()
        self.compute.marks.mark(Phase.OPTIMIZER, step, epoch)
        self.status.begin_update()
        if not skip_reason:
            self._update(step)
            self.health.remember(loss=sums.loss, count=sums.count, turn=self.compute.turn)
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
            communication_s=self.compute.communication.take_wait_s(),
            turn=self.compute.turn, optimizers=self._group_names())

    def _repeat_first_samples(self, step: int) -> None:
        """Collective. Call the trial, once, when each turn has had two updates."""
        if self.trial is not None and step > self.computes.two_updates:
            trial, self.trial = self.trial, None
            trial(step)

    def _take_turn(self, step: int) -> None:
        """Compute a step by what its turn needs."""
        self.compute = self.computes.of_step(step)
        self.objective, self.parameters = self.compute.objective, self.compute.parameters
        if isinstance(self.optimizer, NamedOptimizers):
            self.optimizer.select(self.compute.turn)

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
            with waiting_for(WaitsFor.DEVICE):
                self.boundary.wait_for_device()
        return sums

    def _update(self, step: int) -> None:
        """Apply the update. What the user's code draws in it is keyed, equally on all ranks."""
        key, on_device = rng.mix(self.state.seed, rng.MICRO), self.compute.on_device
        if self.own_update:
            rng.seed_all(step, UPDATE, state=key, devices=on_device)
        if 0 < self.computes.frozen_until < step:  # the first of these steps may be skipped
            fill_momentum(self.optimizer)
        self.optimizer.step()  # `scaler.step` would read from the device what `norm` tells
        rate = self.optimizer.param_groups[0]["lr"]
        self.schedule.step()
        if "cycles" in self.state.parts:
            self.state.parts["cycles"].note(step, float(rate), self._lrs()[0])
        if self.after_step is not None:
            rng.seed_all(step, AFTER_STEP, state=key, devices=on_device)
            rng.key(self._own_generators, self.state.seed, rng.MICRO, step,
                    AFTER_STEP)
            with torch.no_grad():
                self.after_step(self.compute.model, step)
            self.boundary.buffers.restore_storage()
        if self.ema is not None:
            self.ema.update()

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
            seconds=time.perf_counter() - start, device_s=None, optimizers=self._group_names())

    def _loss_scale(self) -> Tensor | None:
        """The factor of the loss in backward (fp16), on the device."""
        if not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self.parameters[0].device))

    def _lrs(self) -> tuple[float, ...]:
        return tuple([float(group["lr"]) for group in self.optimizer.param_groups])

    def _group_names(self) -> tuple[str, ...]:
        if not isinstance(self.optimizer, NamedOptimizers):
            return ()
        return tuple(group["optimizer"] for group in self.optimizer.param_groups)

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
        if not isinstance(count, Tensor):
            if count == nominal_count:
                return
            count = count or math.nan  # avoids a division by 0; the update is skipped
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, nominal_count / count)
