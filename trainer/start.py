"""How an attempt starts: warm up first, then restore, so that every attempt computes alike."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from trainer import memory
from trainer.agreement import checksums
from trainer.data.loader import Loader
from trainer.errors import ConfigError
from trainer.parts import Parts
from trainer.product import best_rule
from trainer.step import Step
from trainer.sync_batchnorm import CudaSyncBatchNorm, SyncBatchNorm
from trainer.world import World


def start(run: Parts) -> None:
    """Collective. Warm up, then put the state of the found checkpoint in place."""
    if run.progress.step < run.intervals.total:
        run.log.phase = "warm-up"
        with run.world.patient():
            run.memory.activations_mb = warm_up(
                run.step, run.loader, run.world,
                find_unused=run.config.parallel.find_unused == "on")
        run.checkpoint.overlap = not run.step.moves_parameters
        figures = [] if run.validate is None else run.validate.figures
        metrics = [f"val_{name}" for name in (*(run.step.objective.tally.names or ()), *figures)]
        best_rule(run.config.eval.best, ["val_loss", *metrics])  # wrong: now, not an epoch later
        run.state.schedule.check_metric(["val_loss", *metrics])
    if run.found is not None:
        run.log.phase = "restore"
        run.faults.at("restore", step=run.found.step)
        run.checkpoint.load(run.found)
        if run.progress.validated == run.progress.step:
            run.draw(again=False)  # where it was lost with rank 0
    run.log.info(run.memory.told(run.state.model, run.state.optimizer))
    run.state.key_rng(run.world.rank)
    run.spare_updates()


def warm_up(
    step: Step, loader: Loader, world: World, *, find_unused: bool = False
) -> float | None:
    """Collective. One synchronised forward and backward of the first real micro-batch.

    DDP reorders its buckets after the first backward, which moves the bits of sums over three or
    more ranks; compilers and allocators settle too. A resumed attempt that did this in its first
    step would differ from one that went straight on. Buffers and gradients are put back.

    It also tells whether the model's own forward moves its parameters, as few do
    (`step.moves_parameters`).

    Returns:
        MiB of the micro-batch's activations; None where they can't be told.
    """
    step.buffers.keep()
    before = checksums(step.model.parameters())
    micro = loader.peek()
    slot = dataclasses.replace(micro.slot, last=True)
    activations = memory.activations(
        step.model, lambda: step.forward_backward(
            dataclasses.replace(micro, slot=slot), rehearsal=True), step.buffers.put_back)
    if (world.size > 1 or step.reduction is not iter) and not find_unused:
        refuse_unused(step, world)
    step.objective.take_sums(world.size)
    step.communication.forget()
    loader.waited_s = 0.0
    step.moving = moving_buffers(step, world)
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)
    moved = (checksums(step.model.parameters()) != before).any().double().cpu()
    step.moves_parameters = bool(world.all_sum(moved))
    return activations


def refuse_unused(step: Step, world: World) -> None:
    """Collective. DDP waits for ever for the gradient of a parameter that isn't used; and where
    the number of ranks may change, one rank refuses what several would.

    Raises:
        ConfigError: names the parameters that got no gradient on some rank.
    """
    mine = [n for n, p in step.model.named_parameters() if p.requires_grad and p.grad is None]
    unused = sorted({name for names in world.gather_json(mine) for name in names})
    if unused:
        raise ConfigError(
            f"--task: the loss of the first batch doesn't depend on the trainable parameters "
            f"{', '.join(unused[:5])}{', …' if len(unused) > 5 else ''}; freeze them "
            "(requires_grad_(False)), use them, or set --parallel.find-unused on.")


def moving_buffers(step: Step, world: World) -> list[torch.Tensor]:
    """Collective. The buffers that the forward has just moved on some rank, and that no
    synchronised batch norm, or the reduction, keeps equal."""
    if world.size == 1:
        return []
    moved = torch.tensor([float(torch.any(a != b)) for a, b in step.buffers.pairs()])
    world.all_sum(moved)
    synchronised = (SyncBatchNorm, CudaSyncBatchNorm)
    shared = {id(b) for m in step.model.modules() if isinstance(m, synchronised)
              for b in nn.Module.buffers(m, recurse=False)}
    live = [b for b, _ in step.buffers.pairs()]
    return [b for b, m in zip(live, moved.tolist(), strict=True)
            if m and id(b) not in shared and b not in step.shared]
