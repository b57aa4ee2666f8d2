"""Diagnosis of a bad step: rank, samples, parameters and input that caused it, and a remedy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from trainer.data import batch as batches
from trainer.data.map_dataset import Micro
from trainer.distributed.world import World
from trainer.optim.bad_step_check import NONFINITE
from trainer.step import Step

SHOWN = 8
"""Maximal number of names in a message."""
SQUARED = math.sqrt(torch.finfo(torch.float32).max)
"""Largest value with a finite square."""


def find_causes(step: Step, window: Sequence[Micro], world: World) -> list[dict[str, Any]]:
    """Collective. Find the micro-batches that made the last step bad.

    These are the micro-batches whose loss was not finite. If all losses were finite, each
    micro-batch is computed again, and those whose gradients or buffers are not finite count.

    Args:
        window: this rank's micro-batches of the step, on the host.

    Returns:
        A dict for each micro-batch of all ranks: "rank", "micro_batch", "samples" (indices),
        "loss" (as text, since NaN is no JSON number), "buffers" (names of buffers that the forward
        left non-finite), and "input" (samples with non-finite values; if "buffers" is not empty,
        samples with values that have no finite square). Empty if the computation is finite now:
        then the hardware or an injected fault was the cause.
    """
    losses = [float(total) for total in step.objective.tally.totals]
    bad: dict[int, list[str]] = {
        i: [] for i, loss in enumerate(losses) if not math.isfinite(loss)}
    if not any(world.gather_json(bool(bad))):
        bad = _recompute(step, window, keeps_buffers=world.rank == world.size - 1)
    mine = [
        {"rank": world.rank, "micro_batch": window[i].slot.number,
         "samples": list(window[i].slot.indices), "loss": str(losses[i]),
         "input": _beyond(window[i], SQUARED if buffers else math.inf), "buffers": buffers}
        for i, buffers in bad.items()
    ]  # fmt: skip
    causes = [cause for causes in world.gather_json(mine) for cause in causes]
    # Synchronised batch norm spreads a bad input to all ranks: then only its origin counts.
    return [cause for cause in causes if cause["input"]] or causes


def bad_parameters(step: Step) -> list[str]:
    """Names of the parameters with non-finite reduced gradients; equal on all ranks."""
    return [name for name, parameter in step.model.named_parameters()
            if parameter.grad is not None
            and not bool(torch.isfinite(parameter.grad.to_dense()).all())]


def told(reason: str, causes: Sequence[dict[str, Any]], parameters: Sequence[str],
         trainable: int, *, count: float = 1.0) -> str:
    """Describe the cause of a bad step and a remedy.

    Args:
        reason: why the update was skipped (see `health`).
        count: divisor of the loss of the whole step.
    """
    if reason != NONFINITE:
        return "the loss is far above the recent ones (--nonfinite.spike-z)"
    parts = []
    for cause in causes[:SHOWN]:
        place = (f"micro-batch {cause['micro_batch']} (samples {_listed(cause['samples'])})"
                 if cause["samples"] else "an empty micro-batch, which must change no buffer"
                 if cause["buffers"] else
                 "an empty micro-batch: the loss of 0 samples must be 0")
        what = (f"loss {cause['loss']}" if not math.isfinite(float(cause["loss"]))
                else f"its forward makes {_listed(cause['buffers'])} non-finite"
                if cause["buffers"] else "the gradient is not finite")
        parts.append(f"{what} on rank {cause['rank']}, {place}")
        if cause["input"]:
            parts.append(("values without a finite square" if cause["buffers"] else
                          "the input was already non-finite")
                         + f": samples {_listed(cause['input'])}")
    if not causes and not 0 < count < math.inf:
        parts.append(f"the sum of Outcome.count over all micro-batches, which divides the loss, is "
                     f"{count:g}; return the number of summed values in the task's loss")
    elif not causes:
        parts.append("the same computation is finite now, so data and weights are not the cause")
    which = "all" if len(parameters) == trainable else str(len(parameters))
    some = "" if len(parameters) == trainable else f": {_listed(parameters)}"
    if parameters:
        parts.append(f"gradients not finite: {which} of {trainable} parameters{some}")
    if any(cause["input"] for cause in causes):
        parts.append("correct these samples, or exclude them in the data set")
    elif any(cause["buffers"] and cause["samples"] for cause in causes):
        parts.append("look for values in these samples that are far too large")
    elif any(cause["buffers"] for cause in causes):
        parts.append("the forward must not change its buffers for an empty batch")
    elif causes:
        parts.append("try a lower --optim.lr or --clip.norm, --precision.dtype fp32, and a loss "
                     "that is defined everywhere (log of 0, sqrt at 0, division by 0)")
    return "; ".join(parts)


def _recompute(
    step: Step, window: Sequence[Micro], *, keeps_buffers: bool
) -> dict[int, list[str]]:
    """Compute micro-batches again; index → non-finite buffers of those that are bad.

    A micro-batch is bad if its gradients or buffers are not finite. Every rank computes all its
    micro-batches, so that collectives in the forward pair up.

    Args:
        keeps_buffers: the step takes its buffers from this rank, so those of an empty micro-batch
            count too.
    """
    parameters, bad = step.parameters, {}
    step.buffers.keep()
    try:
        for i, micro in enumerate(window):
            step.optimizer.zero_grad(set_to_none=True)  # avoid memory for a second set of gradients
            batch = batches.to_device(micro.batch, parameters[0].device)
            slot = dataclasses.replace(micro.slot, last=False)
            step.forward_backward(Micro(slot, batch), rehearsal=True)
            gradients = [p.grad for p in parameters if p.grad is not None]
            buffers = step.buffers.spoilt_names() if micro.samples or keeps_buffers else []
            if buffers or not all(bool(torch.isfinite(g.to_dense()).all()) for g in gradients):
                bad[i] = buffers
            step.buffers.put_back()
    finally:  # if a peer dies in the meantime, this step boundary may be saved
        step.buffers.put_back()
        step.objective.forget()
    return bad


def _beyond(micro: Micro, limit: float) -> list[int]:
    """Indices of the samples with a value in the batch that is not below the limit."""
    indices = micro.slot.indices
    found = set()
    for tensor in batches.tensors(micro.batch):
        per_sample = tensor.dim() > 0 and len(tensor) == len(indices) > 0
        if tensor.is_floating_point() and per_sample:
            within = (tensor.reshape(len(tensor), -1).abs() < limit).all(1)
            found |= {indices[i] for i in (~within).nonzero().flatten().tolist()}
    return sorted(found)


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
