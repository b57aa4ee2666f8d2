"""Batch normalisation over the samples of all ranks, on any device, for stand-ins too.

`nn.SyncBatchNorm` refuses CPU tensors in training mode, and on a GPU it reads back which ranks have
samples, three times per layer and forward (pytorch #78656). `SyncBatchNorm` here computes the same
with one all-gather each in the forward and backward, whose rows every rank combines in the same
order: statistics and buffers have the same bits on all ranks, and no host waits for a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from trainer.distributed.comm_timer import CommunicationTimer
from trainer.distributed.torch_private import BatchNorm
from trainer.errors import ConfigError


def convert(model: nn.Module, world_size: int, device_type: str,
            process_group: dist.ProcessGroup | None = None, *, plain: bool = True) -> int:
    """Convert the batch norms of `model` to synchronised ones, in place; return their number.

    The modules stay the same objects, with their parameters, buffers and hooks. With `world_size` 1
    only `nn.SyncBatchNorm` modules on other devices than CUDA are converted, since they could not
    train there. Subclasses that override `forward` are skipped, and without `plain` all batch norms
    that aren't synchronised by torch's class.
    """
    found = [m for m in model.modules() if isinstance(m, BatchNorm)
             and not isinstance(m, LazyModuleMixin)
             and type(m).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)
             and ((plain and world_size > 1) or isinstance(m, nn.SyncBatchNorm))
             and (world_size > 1 or device_type != "cuda")]
    for module in found:
        group = process_group or getattr(module, "process_group", None)
        module.__class__ = SyncBatchNorm
        cast(SyncBatchNorm, module).process_group = group
    if found:
        _exclude_from_compilation()
    return len(found)


@functools.cache
def _exclude_from_compilation() -> None:
    """Keep torch.compile out of `SyncBatchNorm.forward`: it would compile the parts around the
    collective for each rank's own batch size, and the bits of the buffers could differ. Not a
    decorator: that imports for seconds."""
    SyncBatchNorm.forward = torch.compiler.disable(  # type: ignore[method-assign]
        SyncBatchNorm.forward)


def refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"--parallel.reduction canonical: {name} of the model is a SyncBatchNorm; its "
                "statistics depend on the number of ranks that share a batch. Use nn.BatchNorm, or "
                "--parallel.reduction ddp.")


_has_samples = True  # False: a stand-in is computed


@contextlib.contextmanager
def without_samples() -> Iterator[None]:
    """Context in which synchronised batch norms take part with 0 samples, whatever their input."""
    global _has_samples
    _has_samples = False
    try:
        yield
    finally:
        _has_samples = True


def is_synchronised(module: nn.Module) -> bool:
    """Whether the next forward of a module computes the statistics of several ranks."""
    return (isinstance(module, SyncBatchNorm) and module.training
            and dist.is_initialized() and dist.get_world_size(module.process_group) > 1)


class SyncBatchNorm(BatchNorm):
    """Batch norm with training statistics over the samples of all ranks, in fp32 or wider. A rank
    with 0 samples takes part and updates its buffers like the others. With one rank, and in eval
    mode, it is a plain batch norm without communication."""

    process_group: dist.ProcessGroup | None = None
    communication: CommunicationTimer | None = None

    def measure_with(self, timer: CommunicationTimer) -> None:
        """Record how long ranks wait for each other in this module's collectives."""
        self.communication = timer

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Collective in training mode. Input (N, C, …); the output has its shape and type. One
        value per channel on all ranks together is a ValueError on all of them, as in torch; on a
        GPU it makes the running variance NaN."""
        if not is_synchronised(self):
            return super().forward(input)
        self._check_input_dim(input)
        if not _has_samples and input.numel():  # by its own statistics, which count as 0 samples
            output = torch.batch_norm(input, self.weight, self.bias, None, None, True, 0.0,
                                      self.eps, torch.backends.cudnn.enabled)
            return output + self(input[:0]).sum()
        mean, variance, total = _global_statistics(input.detach(), self)
        if input.is_cuda:
            self._update_buffers(mean, variance, total)
            return _NormalizeOnCuda.apply(input, self.weight, self.bias, mean, variance, total,
                                          self)
        count = int(total)
        if count == 1:
            raise ValueError("Expected more than 1 value per channel when training, got input size "
                             f"{tuple(input.shape)} on this rank and one value on all ranks")
        if count == 0:  # no rank has a sample: an empty output with a graph, and no update
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True)
        self._update_buffers(mean, variance, count)
        return _Normalize.apply(input, self.weight, self.bias, mean, variance, count, self)

    def _update_buffers(self, mean: Tensor, variance: Tensor, count: int | Tensor) -> None:
        """A `count` on the device may be 0; the buffers stay the same then."""
        if not self.track_running_stats:
            return
        on_host = isinstance(count, int)
        tracked, counts = self.num_batches_tracked, on_host or count > 0
        factor: float | Tensor | None = self.momentum
        if tracked is not None:
            tracked.add_(counts)
            if factor is None:  # the cumulative average
                factor = 1.0 / (float(tracked) if on_host else tracked.double().clamp(min=1))
        if self.running_mean is not None and self.running_var is not None:
            weight: float | Tensor = counts * (0.0 if factor is None else factor)
            unbiased = variance * (count / (count - 1))
            for buffer, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                buffer.lerp_(new.to(buffer.dtype), weight.to(buffer.dtype)
                             if isinstance(weight, Tensor) else weight)


def _gather_rows(row: Tensor, module: SyncBatchNorm) -> Tensor:
    """Collective. Gather `row` (K,) of every rank to (ranks, K)."""
    rows = row.new_empty(dist.get_world_size(module.process_group), row.numel())
    began_s = 0.0 if module.communication is None else module.communication.clock()
    # Sums use it too: with gloo it takes 2/3 of the time of an all-reduce, and ranks sum in order.
    if row.is_cuda:  # gloo cannot gather to one tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(rows, row, group=module.process_group)
    else:
        dist.all_gather(list(rows.unbind()), row, group=module.process_group)
    if module.communication is not None:
        module.communication.add_collective(began_s)
    return rows


def _global_statistics(x: Tensor, module: SyncBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Collective. Mean (C,), biased variance (C,) and values per channel (a float64 scalar), over
    all ranks; zeros without samples.

    Each rank's (mean, variance, count) are combined without cancellation: Chan, Golub, LeVeque,
    "Algorithms for computing the sample variance" (1983), with M2 = variance * count.
    """
    dtype, channels = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    if x.numel() == 0:
        row = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    else:
        wide = x if x.is_cuda else x.to(dtype)  # CUDA's kernel sums in `dtype` by itself
        own_mean, own_variance = torch.ops.aten.batch_norm_update_stats(wide, None, None, 0.0)
        own_count = x.new_full((1,), x.numel() // channels, dtype=torch.float64)
        row = torch.cat((own_mean, own_variance, own_count))  # in fp64
    means, variances, counts = _gather_rows(row, module).split((channels, channels, 1), dim=1)
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    mean = (means * shares).sum(0)
    variance = (means - mean).square_().add_(variances).mul_(shares).sum(0)
    return mean.to(dtype), variance.to(dtype), count


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, where mean and variance depend on x.

    Let y be the normalised x, g the gradient of the output, and E the mean over the samples of all
    ranks. The gradient of x is weight / sqrt(variance + eps) * (g - E[g] - y * E[g * y]).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
                variance: Tensor, count: int, module: SyncBatchNorm) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.module = count, module
        if x.numel() == 0:
            return torch.empty_like(x)
        return _affine(x.to(mean.dtype), weight, bias, mean, variance, module.eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Collective if the input needs a gradient."""
        x, weight, mean, variance = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype, channels, eps = mean.dtype, x.shape[1], ctx.module.eps
        if x.numel() == 0:
            sums = mean.new_zeros(2 * channels)
        else:
            wide_x, g = x.to(dtype), grad_output.to(dtype)
            # The gradients of weight and bias of the eval-mode kernel are the sums behind
            # E[g * y] and E[g] over this rank's samples, not yet divided by the count.
            sums = torch.cat(torch.ops.aten.native_batch_norm_backward(
                g, wide_x, None, mean, variance, None, None, False, eps, [False, True, True])[1:])
        grad_x = None
        if needs_x:
            total = _gather_rows(sums, ctx.module).sum(0)
            if x.numel() == 0:
                grad_x = torch.empty_like(x)
            else:
                scale = torch.rsqrt(variance + eps)
                if weight is not None:
                    scale = scale * weight.to(dtype)
                minus_gy, minus_g = total.view(2, channels).div_(-ctx.count)
                per_channel = (1, channels) + (1,) * (x.dim() - 2)
                grad_x = _affine(wide_x, minus_gy, minus_g, mean, variance, eps)
                grad_x = grad_x.add_(g).mul_(scale.view(per_channel)).to(x.dtype)
        return (grad_x, sums[:channels].to(weight.dtype) if needs_weight else None,
                sums[channels:].to(weight.dtype) if needs_bias else None, None, None, None, None)


class _NormalizeOnCuda(torch.autograd.Function):
    """`_Normalize` by the kernels of `nn.SyncBatchNorm`, with one pass over memory in the forward
    and two in the backward. `count` is on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
                variance: Tensor, count: Tensor, module: SyncBatchNorm) -> Tensor:
        x, scale = _dense(x), torch.rsqrt(variance + module.eps)
        ctx.save_for_backward(x, weight, mean, scale, count.reshape(1).to(torch.int32))
        ctx.module = module
        if x.numel() == 0:
            return torch.empty_like(x)
        weight, bias = _cast(weight, mean.dtype), _cast(bias, mean.dtype)
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, module.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Collective if the input needs a gradient."""
        x, weight, mean, scale, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g, wide, zeros = _dense(grad_output), _cast(weight, mean.dtype), torch.zeros_like(mean)
        # Σ g, Σ g * (x - mean), Σ g * y, Σ g
        sums = (zeros,) * 4 if x.numel() == 0 else torch.batch_norm_backward_reduce(
            g, x, mean, scale, wide, needs_x, needs_weight, needs_bias)
        grad_x = None
        if needs_x:
            sum_g, sum_gx = _gather_rows(torch.cat(sums[:2]), ctx.module).sum(0).chunk(2)
            grad_x = torch.empty_like(x) if x.numel() == 0 else torch.batch_norm_backward_elemt(
                g, x, mean, scale, wide, sum_g, sum_gx, count)
        return (grad_x, sums[2].to(weight.dtype) if needs_weight else None,
                sums[3].to(weight.dtype) if needs_bias else None, None, None, None, None)


def _dense(x: Tensor) -> Tensor:
    """A tensor in a memory format that the CUDA kernels know."""
    formats = (torch.channels_last, torch.channels_last_3d)
    return x if any(x.is_contiguous(memory_format=f) for f in formats) else x.contiguous()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor,
            eps: float) -> Tensor:
    """Normalise with the given statistics, in one pass over memory."""
    return torch.ops.aten.native_batch_norm(
        x, _cast(weight, mean.dtype), _cast(bias, mean.dtype), mean, variance, False, 0.0, eps)[0]


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)
