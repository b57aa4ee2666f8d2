"""Warm up before the state is restored, so that every attempt computes alike."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from trainer.data.loader import Loader
from trainer.step import Step
from trainer.sync_batchnorm import CudaSyncBatchNorm, SyncBatchNorm
from trainer.world import World


def warm_up(step: Step, loader: Loader, world: World) -> None:
    """Collective. One synchronised forward and backward of the first real micro-batch.

    DDP reorders its buckets after the first backward, which moves the bits of sums over three or
    more ranks; compilers and allocators settle too. A resumed attempt that did this in its first
    step would differ from one that went straight on. Buffers and gradients are put back; the
    parameters have not moved.
    """
    step.buffers.keep()
    micro = loader.peek()
    slot = dataclasses.replace(micro.slot, last=True)
    step.forward_backward(dataclasses.replace(micro, slot=slot), rehearsal=True)
    step.objective.take_sums(world.size)
    step.moving = moving_buffers(step, world)
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)


def moving_buffers(step: Step, world: World) -> list[torch.Tensor]:
    """Collective. The buffers that the forward has just moved on some rank, and that no
    synchronised batch norm keeps equal."""
    if world.size == 1:
        return []
    moved = torch.tensor([float(torch.any(a != b)) for a, b in step.buffers.pairs()])
    world.all_sum(moved)
    synchronised = (SyncBatchNorm, CudaSyncBatchNorm)
    shared = {id(b) for m in step.model.modules() if isinstance(m, synchronised)
              for b in nn.Module.buffers(m, recurse=False)}
    live = [b for b, _ in step.buffers.pairs()]
    return [b for b, m in zip(live, moved.tolist(), strict=True) if m and id(b) not in shared]
