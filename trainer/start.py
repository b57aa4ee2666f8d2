"""How an attempt starts: warm up first, then restore, so that every attempt computes alike."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer import hidden, memory
from trainer.agreement import checksums
from trainer.data import batch as batches
from trainer.data.loader import Loader
from trainer.data.reading import Micro
from trainer.errors import ConfigError, told_by
from trainer.log import Log
from trainer.optim import unfit_for_sparse
from trainer.parts import Parts
from trainer.product import best_rule
from trainer.status import Phase
from trainer.step import Step
from trainer.sync_batchnorm import CudaSyncBatchNorm, SyncBatchNorm
from trainer.world import World


def start(run: Parts) -> None:
    """Collective. Warm up, then put the state of the found checkpoint in place."""
    if run.progress.step < run.intervals.total:
        run.status.enter(Phase.WARM_UP)
        with run.world.patient():
            run.memory.activations_mb = warm_up(
                run.step, run.loader, run.world, run.log, run.state.check_form,
                first=run.found is None,
                find_unused=run.config.parallel.find_unused == "on")
        run.checkpoint.overlap = not run.step.moves_parameters
        figures = [] if run.validate is None else run.validate.figures
        metrics = [f"val_{name}" for name in (*(run.step.objective.tally.names or ()), *figures)]
        best_rule(run.config.eval.best, ["val_loss", *metrics])  # wrong: now, not an epoch later
        run.state.schedule.check_metric(["val_loss", *metrics])
    if run.found is not None:
        run.status.enter(Phase.RESTORE)
        run.marks.mark(Phase.RESTORE, run.found.step)
        run.checkpoint.load(run.found)
        if run.progress.validated == run.progress.step:
            run.draw(again=False)  # where it was lost with rank 0
    run.log.info(run.memory.told(run.state.model, run.state.optimizer))
    if run.step.own_update:
        hidden.watch(run.step.optimizer, run.state.names(), run.log)
    run.state.key_rng(run.world.rank)
    run.spare_updates()


def warm_up(
    step: Step, loader: Loader, world: World, log: Log, check_form: Callable[[], None], *,
    find_unused: bool = False, first: bool = False,
) -> float | None:
    """Collective. One synchronised forward and backward of the first real micro-batch.

    DDP reorders its buckets after the first backward, which moves the bits of sums over three or
    more ranks; compilers and allocators settle too. A resumed attempt that did this in its first
    step would differ from one that went straight on. Buffers and gradients are put back.

    It also tells whether the model's own forward moves its parameters, as few do
    (`step.moves_parameters`).

    Args:
        check_form: raises where the forward has made the model another one.
        first: nothing has been trained yet: the micro-batch is computed once more before, by each
            rank for itself (see `rehearse`).

    Returns:
        MiB of the micro-batch's activations; None where they can't be told.

    Raises:
        ConfigError: the model doesn't fit the reduction (see `refuse_unused` and what follows it),
            or its forward has made it another one.
    """
    step.buffers.keep()
    before = checksums(step.model.parameters())
    versions = [p._version for p in step.model.parameters()]
    micro = _apart(loader.peek())
    slot = dataclasses.replace(micro.slot, last=True)
    by_number = step.reduction is not iter
    seen = rehearse(step, world, _apart(micro), check_form,
                    unused_may_be=find_unused or by_number) if first else None
    with counted(step.parameters if by_number else ()) as times:
        activations = memory.activations(
            step.model, lambda: step.forward_backward(
                dataclasses.replace(micro, slot=slot), rehearsal=True), step.buffers.put_back)
    step.in_place = any(t._version for t in batches.tensors(micro.batch))
    step.buffers.bring_home()
    check_form()
    if by_number:
        refuse_parts(step, world, times)
    refuse_sparse(step, world)
    if (world.size > 1 or by_number) and not find_unused:
        # By number, nothing is taken of an empty micro-batch: its gradients may be missing.
        refuse_unused(step, world, looked=not (by_number and micro.slot.number < 0))
    step.objective.take_sums(world.size)
    step.communication.forget()
    loader.waited_s = 0.0
    step.kept_equal = moved_buffers = buffers_moved(step, world)
    step.moving = moving_buffers(step, world, moved_buffers)
    step.buffers.watch(moved_buffers)
    if world.rank == world.size - 1:  # its buffers are taken where ranks don't share them
        step.objective.spoilt = step.buffers.spoilt
    if lost := forgotten_buffers(step):
        log.announce(f"the model's forward moves {_listed(lost)}, "
                     "and no checkpoint holds a buffer registered with persistent=False: if it "
                     "isn't a mere cache, a restart differs")
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)
    after = checksums(step.model.parameters())
    # A teacher that still equals its student is moved too, and stays what it was.
    touched = torch.tensor([p._version != version for p, version in
                            zip(step.model.parameters(), versions, strict=True)])
    moved = world.all_sum(((after != before).cpu() | touched).double())
    step.moves_parameters = bool(moved.any())
    if by_number:
        refuse_moved(step, moved.tolist())
    if step.moves_parameters:
        refuse_parting(step, world, after.tolist())
    elif seen is not None and torch.are_deterministic_algorithms_enabled() and (
            why := hidden.told(seen, hidden.Seen.of(step))):
        log.announce(why)
    return activations


def rehearse(
    step: Step, world: World, micro: Micro, check_form: Callable[[], None], *, unused_may_be: bool
) -> hidden.Seen:
    """Collective. A forward and backward that ranks don't sum: a parameter that only some of them
    use is found, where DDP would wait for ever.

    Raises:
        ConfigError: see `refuse_unused`; or the forward has made the model another one.
    """
    slot = dataclasses.replace(micro.slot, last=False)
    step.forward_backward(dataclasses.replace(micro, slot=slot), rehearsal=True)
    step.buffers.bring_home()
    check_form()
    if world.size > 1 and not unused_may_be:
        refuse_unused(step, world)
    step.objective.tally.take()
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)
    return hidden.Seen.of(step)


def _apart(micro: Micro) -> Micro:
    """A copy: a loss that works on its batch in place isn't to find it done."""
    return dataclasses.replace(micro, batch=batches.copy_of(micro.batch))


def refuse_unused(step: Step, world: World, *, looked: bool = True) -> None:
    """Collective. DDP waits for ever for the gradient of a parameter that isn't used; and where
    the number of ranks may change, one rank refuses what several would.

    Args:
        looked: whether this rank's gradients tell which parameters are used.

    Raises:
        ConfigError: names the parameters that got no gradient on some rank.
    """
    mine = [n for n, p in step.model.named_parameters()
            if looked and p.requires_grad and p.grad is None]
    unused = sorted({name for names in world.gather_json(mine) for name in names})
    if unused:
        raise told_by(0, ConfigError(
            f"--task: the loss of the first batch doesn't depend on the trainable parameters "
            f"{_listed(unused)}; freeze them (requires_grad_(False)), use them, or set "
            "--parallel.find-unused on."))


@contextlib.contextmanager
def counted(parameters: Iterable[Tensor]) -> Iterator[Counter[Tensor]]:
    """How often a backward within adds to each parameter's gradient."""
    times = Counter[Tensor]()

    def count(parameter: Tensor) -> None:
        times[parameter] += 1

    hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()


def refuse_parts(step: Step, world: World, times: Mapping[Tensor, int]) -> None:
    """Collective. Where the bits are those of any number of ranks, each micro-batch's gradient has
    to come as one sum: parts of it would be added one by one to what is there.

    Raises:
        ConfigError: names the parameters whose gradients come in parts on some rank.
    """
    mine = [n for n, p in step.model.named_parameters()
            if times.get(p, 0) > 1 or (p.grad is not None and p.grad.layout != torch.strided)]
    parts = sorted({name for names in world.gather_json(mine) for name in names})
    if parts:
        raise told_by(0, ConfigError(
            f"--parallel.reduction canonical: the gradients of {_listed(parts)} come in parts, "
            "whose sum would depend on the number of ranks: they are sparse (use sparse=False), or "
            "a backward within the backward adds to them as well (use_reentrant=False in "
            "checkpoints); or use --parallel.reduction ddp."))


def refuse_sparse(step: Step, world: World) -> None:
    """Collective. Most optimizers take no sparse gradients, and would say so in the first update.

    Raises:
        ConfigError: names the optimizer, the parameters, and what to use.
    """
    sparse, dense = dict[Tensor, str](), dict[Tensor, str]()
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            (dense if parameter.grad.layout == torch.strided else sparse)[parameter] = name
    told = unfit_for_sparse(step.optimizer, step.clip, sparse, dense)
    if why := next(filter(None, world.gather_json(told)), ""):
        raise told_by(0, ConfigError(f"{why}."))


def refuse_moved(step: Step, moved: list[float]) -> None:
    """Where the bits are those of any number of ranks, no forward may move parameters: it does so
    once for each micro-batch of its rank.

    Args:
        moved: of each parameter, whether some rank's forward has moved it.

    Raises:
        ConfigError: names those.
    """
    names = [n for (n, _), m in zip(step.model.named_parameters(), moved, strict=True) if m]
    if names:
        raise told_by(0, ConfigError(
            "--parallel.reduction canonical: the model's own forward moves the parameters "
            f"{_listed(names)}, so they would depend on the number of ranks; make them buffers "
            "(register_buffer), or use --parallel.reduction ddp."))


def refuse_parting(step: Step, world: World, sums: list[int]) -> None:
    """Collective. A forward that moves parameters has to move them alike on all ranks.

    Args:
        sums: checksums of the parameters after it.

    Raises:
        ConfigError: names those that differ.
    """
    everywhere = world.gather_json(sums)
    names = [n for (n, _), *values in zip(step.model.named_parameters(), *everywhere, strict=True)
             if len(set(values)) > 1]
    if names:
        raise told_by(0, ConfigError(
            f"--task: the model's own forward moves the parameters {_listed(names)}, on each rank "
            "by its own samples (max_norm of an Embedding does, and an initialisation by the first "
            "batch), so ranks would part; compute it without moving them, make them buffers, or "
            "train with one rank."))


def buffers_moved(step: Step, world: World) -> frozenset[Tensor]:
    """Collective. The buffers that the forward has just moved on some rank."""
    moved = torch.tensor([float(torch.any(a != b)) for a, b in step.buffers.pairs()])
    world.all_sum(moved)
    live = [b for b, _ in step.buffers.pairs()]
    return frozenset(b for b, m in zip(live, moved.tolist(), strict=True) if m)


def moving_buffers(step: Step, world: World, moved: Container[Tensor]) -> list[Tensor]:
    """Those of the moved buffers that no synchronised batch norm, or the reduction, keeps equal on
    all ranks."""
    if world.size == 1:
        return []
    synchronised = (SyncBatchNorm, CudaSyncBatchNorm)
    shared = {id(b) for m in step.model.modules() if isinstance(m, synchronised)
              for b in nn.Module.buffers(m, recurse=False)}
    return [b for b, _ in step.buffers.pairs()
            if b in moved and id(b) not in shared and b not in step.shared]


def forgotten_buffers(step: Step) -> list[str]:
    """The names of the buffers that the forward has just moved and that aren't in the state."""
    moved = {id(live) for live, kept in step.buffers.pairs() if bool(torch.any(live != kept))}
    held = {id(tensor) for tensor in step.model.state_dict(keep_vars=True).values()}
    return [n for n, b in step.model.named_buffers() if id(b) in moved - held]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', …' * (len(names) > 5)}"
