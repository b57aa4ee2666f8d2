"""What a bad step came from: the rank, the samples, the parameters, the input; and what to try."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from trainer.data import batch as batches
from trainer.data.reading import Micro
from trainer.health import NONFINITE
from trainer.step import Step
from trainer.world import World

SHOWN = 8
SQUARED = math.sqrt(torch.finfo(torch.float32).max)
"""What is larger has no finite square."""


def find_causes(step: Step, window: Sequence[Micro], world: World) -> list[dict[str, Any]]:
    """Collective. The micro-batches that made the last step bad: those whose loss wasn't finite,
    or, if all were, those whose gradients, or what they leave in buffers, aren't when they are
    computed once more.

    Args:
        window: what this rank has read for the step, on the host.

    Returns:
        Of each, from all ranks: "rank", "micro_batch", "samples" (their indices), "loss" (as text,
        since it may be no number of JSON), "input" (those samples whose own values aren't finite;
        have no finite square, where "buffers" names those that the forward has spoilt).
        Empty if the same computation is finite now: then the hardware is to blame, or a drill.
    """
    losses = [float(total) for total in step.objective.tally.totals]
    bad: dict[int, list[str]] = {
        i: [] for i, loss in enumerate(losses) if not math.isfinite(loss)}
    if not any(world.gather_json(bool(bad))):
        bad = _computed_again(step, window, kept=world.rank == world.size - 1)
    mine = [
        {"rank": world.rank, "micro_batch": window[i].slot.number,
         "samples": list(window[i].slot.indices), "loss": str(losses[i]),
         "input": _beyond(window[i], SQUARED if buffers else math.inf), "buffers": buffers}
        for i, buffers in bad.items()
    ]  # fmt: skip
    causes = [cause for causes in world.gather_json(mine) for cause in causes]
    # Synchronised batch norm carries a sick input to all ranks: then the others are echoes.
    return [cause for cause in causes if cause["input"]] or causes


def bad_parameters(step: Step) -> list[str]:
    """The parameters whose reduced gradients aren't finite, equal on all ranks."""
    return [name for name, parameter in step.model.named_parameters()
            if parameter.grad is not None
            and not bool(torch.isfinite(parameter.grad.to_dense()).all())]


def told(fault: str, causes: Sequence[dict[str, Any]], parameters: Sequence[str],
         trainable: int, *, count: float = 1.0) -> str:
    """A sentence for people: what it was, and what to try.

    Args:
        count: what the loss of the whole step was divided by.
    """
    if fault != NONFINITE:
        return "the loss is far above the recent ones (--nonfinite.spike-z)"
    parts = []
    for cause in causes[:SHOWN]:
        place = (f"micro-batch {cause['micro_batch']} (samples {_listed(cause['samples'])})"
                 if cause["samples"] else "an empty micro-batch, which must change no buffer"
                 if cause["buffers"] else
                 "an empty micro-batch: the loss of 0 samples has to be 0")
        what = (f"loss {cause['loss']}" if not math.isfinite(float(cause["loss"]))
                else f"its forward leaves {_listed(cause['buffers'])} not finite"
                if cause["buffers"] else "the gradient isn't finite")
        parts.append(f"{what} on rank {cause['rank']}, {place}")
        if cause["input"]:
            parts.append(("values without a finite square" if cause["buffers"] else
                          "the input was already non-finite")
                         + f": samples {_listed(cause['input'])}")
    if not causes and not 0 < count < math.inf:
        parts.append(f"Outcome.count came to {count:g} over all its micro-batches, and the loss is "
                     "divided by that; let the task's loss return what it has summed over")
    elif not causes:
        parts.append("the same computation is finite now, so neither data nor weights are to blame")
    which = "all" if len(parameters) == trainable else str(len(parameters))
    some = "" if len(parameters) == trainable else f": {_listed(parameters)}"
    spoilt = any(cause["buffers"] and cause["samples"] for cause in causes)
    if parameters:
        parts.append(f"gradients not finite: {which} of {trainable} parameters{some}")
    if any(cause["input"] for cause in causes):
        parts.append("mend these samples, or make the data set leave them out")
    elif spoilt:
        parts.append("look for values in these samples that are far too large")
    elif any(cause["buffers"] for cause in causes):
        parts.append("let the forward leave its buffers as they are where there are no samples")
    elif causes:
        parts.append("try a lower --optim.lr or --clip.norm, --precision.dtype fp32, and a loss "
                     "that is defined everywhere (log of 0, sqrt at 0, division by 0)")
    return "; ".join(parts)


def _computed_again(step: Step, window: Sequence[Micro], *, kept: bool) -> dict[int, list[str]]:
    """Which micro-batches give non-finite gradients or buffers by themselves, with the names of
    the latter. Every rank computes all of its own, so that collectives within a forward pair up.

    Args:
        kept: whether this rank's buffers are those that are kept, also of an empty micro-batch.
    """
    parameters, bad = step.parameters, {}
    step.buffers.keep()
    try:
        for i, micro in enumerate(window):
            step.optimizer.zero_grad(set_to_none=True)  # no second set of gradients beside them
            batch = batches.to_device(micro.batch, parameters[0].device)
            slot = dataclasses.replace(micro.slot, last=False)
            step.forward_backward(Micro(slot, batch), rehearsal=True)
            gradients = [p.grad for p in parameters if p.grad is not None]
            buffers = step.buffers.spoilt_names() if micro.samples or kept else []
            if buffers or not all(bool(torch.isfinite(g.to_dense()).all()) for g in gradients):
                bad[i] = buffers
            step.buffers.put_back()
    finally:  # a peer may die meanwhile, and this boundary be saved
        step.buffers.put_back()
        step.objective.forget()
    return bad


def _beyond(micro: Micro, limit: float) -> list[int]:
    """The samples that have a value in the batch that isn't below the limit."""
    indices = micro.slot.indices
    found = set()
    for tensor in batches.tensors(micro.batch):
        per_sample = tensor.dim() > 0 and len(tensor) == len(indices) > 0
        if tensor.is_floating_point() and per_sample:
            fine = (tensor.reshape(len(tensor), -1).abs() < limit).all(1)
            found |= {indices[i] for i in (~fine).nonzero().flatten().tolist()}
    return sorted(found)


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
