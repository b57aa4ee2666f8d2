"""Model and loss as one module under DistributedDataParallel; sums in the gradient all-reduce."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed import torch_private
from trainer.errors import ConfigError, listed
from trainer.task import Outcome, check_outcome, first_batch

if TYPE_CHECKING:
    from trainer.data.map_dataset import MicroBatch
    from trainer.data.sampler import MicroBatchSpec


def check_reduced(wrapped: nn.Module, spec: MicroBatchSpec, trained: Sequence[str]) -> None:
    """Refuse a backward after which DDP has not reduced every gradient."""
    if isinstance(wrapped, DistributedDataParallel) and (
            unused := torch_private.unreduced(wrapped)) is not None:
        names = [trained[i].removeprefix("module.model.") for i in unused] or ["some parameters"]
        raise ConfigError(
            f"--parallel.find-unused off: the loss of step {spec.step}, micro-batch {spec.number}, "
            f"does not depend on {listed(names)}, so DDP cannot finish the step. Continue with "
            "--parallel.find-unused on.")


CAPACITY = 64  # of the values that one gradient all-reduce carries besides the gradients

REQUESTS = ("stop", "save", "fail", "saved", "recorded", "validate", "buffers")
"""What one rank may request of all ranks: stop after this step; save this step; exit as failed;
the last save is complete; metrics.jsonl has all lines of the steps before durably; validate; agree
on the buffers that change. The last is the objective's, the others are passed to its forward."""

Vector = Tensor | list[float]

_COUNTED = ("loss", "count", "samples", "replaced")
_FIXED = (*_COUNTED, *REQUESTS)
COUNT = _FIXED.index("count")
REQUESTED = slice(len(_COUNTED), len(_FIXED))
_NO_REQUESTS = (False,) * len(REQUESTS)


@dataclass(slots=True)
class StepSums:
    """The sums of one step over all ranks and micro-batches; equal on all ranks."""

    loss: float
    count: float
    samples: int
    replaced: int  # samples that replaced bad ones
    requests: frozenset[str]  # members of `REQUESTS`, of at least one rank
    metrics: dict[str, tuple[float, float]]  # name → (sum, count), named losses included

    @classmethod
    def empty(cls) -> StepSums:
        """The sums of a step without any computation."""
        return cls(0.0, 0.0, samples=0, replaced=0, requests=frozenset(), metrics={})


class MetricAccumulator:
    """Accumulates loss, counts and metrics of this rank's micro-batches in a step. With `on_host`
    each number is read at once, for which a device would have to be waited for."""

    def __init__(self, *, on_host: bool) -> None:
        self.names: tuple[str, ...] | None = None  # of the task's metrics, once a forward has run
        self.named_losses = 0  # the first of these metrics
        self.totals: list[Tensor | float] = []
        """Loss of each of this rank's micro-batches in the last step, on the device or host."""
        self._on_host = on_host
        self.forget()

    def forget(self) -> None:
        self._rows: list[list[Any]] = []
        self._totals: list[Tensor | float] = []
        self._reduced: Vector | None = None
        self._requests: tuple[bool | Tensor, ...] = _NO_REQUESTS

    def add(self, outcome: Outcome, samples: int, replaced: int) -> Tensor:
        """Add a micro-batch, a stand-in with zeros; return its loss, a scalar with a graph."""
        total, metrics = check_outcome(outcome)
        if not total.requires_grad:
            raise ConfigError("the task's loss has no graph: Outcome.total does not depend on any "
                              "trainable parameter. Compute it from the model's output, without "
                              ".detach(), .item() or no_grad().")
        names = tuple(metrics)
        if self.names is None:
            if len(_FIXED) + 2 * len(names) > CAPACITY:
                raise ConfigError(f"the task returns {len(names)} metrics; the maximum is "
                                  f"{(CAPACITY - len(_FIXED)) // 2}.")
            self.names, self.named_losses = names, len(names) - len(outcome.metrics)
        elif self.names != names:
            raise ConfigError(f"the task returned the metrics {list(self.names)} before and "
                              f"{list(names)} now; return the same for each micro-batch.")
        numbers = [total, outcome.count, samples, replaced, *chain.from_iterable(metrics.values())]
        row: list[Any] = [
            float(n) if not isinstance(n, Tensor) else
            float(n.item()) if self._on_host or n.is_cpu else n.detach() for n in numbers]
        if not samples:
            row, total = [0.0] * len(row), total * 0
        self._rows.append(row)
        self._totals.append(row[0])
        return total

    def set_requests(self, requests: tuple[bool, ...], changed: bool | Tensor = False,
                     nonfinite: Tensor | None = None) -> None:
        """Set this rank's requests of the step, and add `nonfinite` (0 or NaN) to its loss."""
        self._requests = (*(requests or _NO_REQUESTS[:-1]), changed)
        if nonfinite is not None:
            row = self._rows[-1]  # not in place: on a device the loss is backward's own tensor
            row[0] = row[0] + (nonfinite.item() if self._on_host else nonfinite)

    def take(self) -> Vector:
        """Return the sums, those of `_FIXED` first, each on the host or the device, and reset."""
        sums = self._add_up() if self._reduced is None else self._reduced
        self.totals = self._totals
        self.forget()
        return sums

    def swap(self, sums: Vector | None) -> Vector:
        """Return the sums of the forwards since the last call, and replace them by `sums`."""
        self._reduced = sums
        return self._add_up() if self._rows else []

    @property
    def width(self) -> int:
        """Number of values in the sums."""
        return len(_FIXED) + 2 * len(self.names or ())

    def _add_up(self) -> list[Any]:
        rows, self._rows = self._rows, []
        assert rows, "no forward has run"
        sums = rows[0] if len(rows) == 1 else list(map(_sum, zip(*rows, strict=True)))
        requests, self._requests = self._requests, _NO_REQUESTS  # each counts as 0 or 1
        return [*sums[: len(_COUNTED)], *requests, *sums[len(_COUNTED) :]]


class Objective(nn.Module):
    """Model and task loss as one module, whose forward returns the loss.

    With several ranks, `stats_carrier` is a parameter whose gradient is, by construction, the
    vector of this rank's sums. DDP all-reduces it with the gradients, in the same collective.

    Args:
        nominal_count: divisor of the summed loss before backward, so that gradients have the
            scale of a mean; the step corrects for the actual count.
        changed: whether the forwards changed a buffer of which the ranks do not know yet.
        nonfinite: returns NaN if the forwards left a buffer that is not finite, which the training
            loss does not show. Both are called after the last forward of a step.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Outcome], *,
                 num_ranks: int, nominal_count: float, device: torch.device,
                 changed: Callable[[], bool | Tensor] = lambda: False,
                 nonfinite: Callable[[], Tensor | None] = lambda: None) -> None:
        super().__init__()
        self.model, self.loss, self.nominal_count = model, loss, nominal_count
        self._factor = num_ranks / nominal_count  # DDP computes the mean over ranks
        self._device, self._on_host = device, device.type == "cpu"
        self.accumulator = MetricAccumulator(on_host=self._on_host)
        self._next_is_nan, self._changed, self._nonfinite = False, changed, nonfinite
        self._is_first_batch = True  # until a forward with samples
        self._look: Callable[[Outcome], None] | None = None
        self.stats_carrier = (nn.Parameter(torch.zeros(CAPACITY, device=device)) if num_ranks > 1
                              else None)
        dtypes = (torch.float32,) if device.type == "mps" else (torch.float32, torch.float64)
        self.gradients = {} if num_ranks > 1 else {
            dtype: torch.tensor(self._factor, dtype=dtype, device=device) for dtype in dtypes}
        """Dtype of the loss → the gradient with which backward begins, in place of 1: that of the
        mean. Empty with several ranks, where `forward` divides the loss, to which it adds sums."""

    def forward(self, batch: Any, samples: int, requests_if_last: tuple[bool, ...] | None = None,
                replaced: int = 0) -> Tensor:
        """Compute the scalar loss of a micro-batch; without `samples` it is a stand-in. Only the
        last one of a step carries this rank's requests: its backward reduces gradients and sums."""
        # A stand-in's buffers are put back, so those before it are checked.
        before = self._look_at_buffers() if requests_if_last is not None and not samples else ()
        if self._is_first_batch and samples:
            self._is_first_batch = False
            with first_batch():
                outcome = self.loss(self.model, batch)
        else:
            outcome = self.loss(self.model, batch)
        if self._look is not None:
            self._look(outcome)
        if self._next_is_nan and samples:
            self._next_is_nan = False
            outcome = dataclasses.replace(outcome, total=check_outcome(outcome)[0] * math.nan)
        loss = self.accumulator.add(outcome, samples, replaced)
        if loss.dtype not in (torch.float32, torch.float64):
            loss = loss.float()
        if self.stats_carrier is not None:
            loss = loss * self._factor
        if requests_if_last is not None:
            self.accumulator.set_requests(
                requests_if_last, *(self._look_at_buffers() if samples else before))
            if self.stats_carrier is not None:
                sums = stack(list(self.accumulator.take()), self._device)
                padded = functional.pad(sums, (0, CAPACITY - len(sums)))
                loss = loss + torch.dot(self.stats_carrier, padded)
        return loss

    def _look_at_buffers(self) -> tuple[bool | Tensor, Tensor | None]:
        return self._changed(), self._nonfinite()

    __call__ = forward  # hooks and compilation are the model's

    @contextlib.contextmanager
    def watched(self, look: Callable[[Outcome], None] | None) -> Iterator[None]:
        """Call `look` with the outcome of each forward inside the context."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def inject_nan(self) -> None:
        """Make the next loss a NaN (fault injection)."""
        self._next_is_nan = True

    def take_sums(self, num_ranks: int, scale: Tensor | None = None) -> Vector:
        """Return the reduced sums of the step, on the device unless reading them is free; reset.
        They contain `scale`, the factor of the loss in backward (fp16)."""
        if self.stats_carrier is None:
            return self._on_device(self.accumulator.take())
        factor: float | Tensor = num_ranks
        if scale is not None:
            factor = num_ranks / (float(scale) if self._on_host else scale)
        reduced, self.stats_carrier.grad = self.stats_carrier.grad, None
        assert reduced is not None, "no synchronised backward has run"
        reduced = reduced[: self.accumulator.width]
        if not self._on_host:
            return reduced * factor
        return self._round_counts([n * factor for n in reduced.tolist()])

    def _round_counts(self, sums: list[float]) -> list[float]:
        """Round the counts, and the sums of metrics, which mostly are counts; not the losses."""
        named = range(len(_FIXED), len(_FIXED) + 2 * self.accumulator.named_losses, 2)
        return [n if i == 0 or i in named else _snap(n) for i, n in enumerate(sums)]

    def swap_sums(self, sums: Vector | None) -> Vector:
        """See `MetricAccumulator.swap`; only without `stats_carrier`."""
        return self._on_device(self.accumulator.swap(sums))

    def _on_device(self, sums: Vector) -> Vector:
        return (sums if self._on_host or isinstance(sums, Tensor) or not sums
                else stack(sums, self._device))

    def forget(self) -> None:
        """Reset, after forwards that belong to no step."""
        self.accumulator.forget()
        if self.stats_carrier is not None:
            self.stats_carrier.grad = None

    def read_sums(self, vector: Vector, others: Sequence[Tensor]) -> tuple[StepSums, list[float]]:
        """Copy the sums and other scalars to the host, in one transfer, for which it waits."""
        if isinstance(vector, list):
            values, read = vector, [float(n) for n in others]
        else:
            numbers = torch.cat([vector, *(n.reshape(1).float() for n in others)]).tolist()
            values, read = self._round_counts(numbers[: len(vector)]), numbers[len(vector) :]
        loss, count, samples, replaced = values[: len(_COUNTED)]
        requests = frozenset(
            name for name, v in zip(REQUESTS, values[REQUESTED], strict=True) if v > 0)
        pairs = zip(values[len(_FIXED) :: 2], values[len(_FIXED) + 1 :: 2], strict=True)
        metrics = dict(zip(self.accumulator.names or (), pairs, strict=True))
        return StepSums(loss, count, round(samples), round(replaced), requests, metrics), read


def with_own_gradients(parameters: Sequence[Tensor], micro_batches: Iterable[MicroBatch]
                       ) -> Iterator[MicroBatch]:
    """The micro-batches of a step. After the first one its gradients are copied, if others add to
    them: those of a CUDA graph lie in memory that its next run overwrites (pytorch #169545)."""
    for index, micro in enumerate(micro_batches):
        yield micro
        if index == 0 and not micro.spec.last:
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()


@contextlib.contextmanager
def no_marks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context of a backward that belongs to no step. With find_unused_parameters, DDP notes the
    parameters with a gradient for its next reduction, also under `no_sync`: these get theirs at
    the end of the context, after it has looked."""
    gradients = dict[Tensor, Tensor]()

    def take(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "it is called after an accumulation"
        earlier = gradients.get(parameter)  # a nested backward may add several times
        gradients[parameter] = gradient if earlier is None else earlier + gradient

    hooks = [p.register_post_accumulate_grad_hook(take) for p in parameters if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def wrap(objective: Objective, *, group: dist.ProcessGroup | None, device: torch.device,
         bucket_mb: float, find_unused: bool = False) -> nn.Module:
    """Wrap the objective in DistributedDataParallel; return it unchanged without a group."""
    if group is None:
        return objective
    # The step restores and broadcasts buffers itself; DDP must not do so in the next forward.
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        objective, process_group=group, bucket_cap_mb=bucket_mb,  # type: ignore[arg-type]
        **{off: False},  # type: ignore[arg-type]
        gradient_as_bucket_view=True, find_unused_parameters=find_unused,
        device_ids=[device.index] if device.type == "cuda" else None)


def _sum(column: Sequence[Any]) -> Any:
    """Sum scalars of host and device."""
    on_device = [n.float() for n in column if isinstance(n, Tensor)]
    # Not `sum`, which rounds otherwise from Python 3.12 on.
    on_host = reduce(add, (n for n in column if not isinstance(n, Tensor)), 0.0)
    return torch.stack(on_device).sum() + on_host if on_device else on_host


def stack(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.float32
          ) -> Tensor:
    """Stack scalars of host and device to a vector on the device, without waiting for it."""
    return torch.stack([
        n.detach().reshape(()).to(device, dtype)
        if isinstance(n, Tensor) and n.device.type == device.type
        else torch.full((), float(n), dtype=dtype, device=device) for n in numbers])


def _snap(value: float) -> float:
    """Round a count that is off by rounding: 3 times the mean over 3 ranks may be."""
    if not abs(value) < 2**24:  # true for NaN and infinities too
        return value
    nearest = round(value)
    return float(nearest) if abs(value - nearest) <= 4e-7 * abs(value) else value
