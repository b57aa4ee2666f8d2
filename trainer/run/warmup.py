"""Start of an attempt: warm up first, then restore, so that every attempt gives the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.data import batch as batches
from trainer.data.loader import Loader
from trainer.data.map_dataset import MicroBatch
from trainer.distributed.replica_check import checksums
from trainer.distributed.sync_batchnorm import CudaSyncBatchNorm, SyncBatchNorm
from trainer.distributed.world import World
from trainer.errors import ConfigError, from_rank, listed
from trainer.optim.optimizers import sparse_gradient_problem
from trainer.run import hidden_state, memory
from trainer.run.finish import best_rule
from trainer.run.run import Run
from trainer.step import Step
from trainer.telemetry.events import Log
from trainer.telemetry.status import Phase


def start(run: Run) -> None:
    """Collective. Warm up, then restore the checkpoint from which the run continues."""
    if run.progress.step < run.intervals.total:
        run.status.enter(Phase.WARM_UP)
        with run.world.long_timeout():
            run.memory.activations_mb = warm_up(
                run.step, run.loader, run.world, run.log, run.state.check_structure,
                first=run.found is None,
                find_unused=run.config.parallel.find_unused == "on")
        run.checkpoint.overlap = not run.step.moves_parameters
        figures = [] if run.validate is None else run.validate.figures
        metrics = [f"val_{name}"
                   for name in (*(run.step.objective.accumulator.names or ()), *figures)]
        best_rule(run.config.eval.best, ["val_loss", *metrics])  # fails now, not an epoch later
        run.state.schedule.check_metric(["val_loss", *metrics])
    if run.found is not None:
        run.status.enter(Phase.RESTORE)
        run.marks.mark(Phase.RESTORE, run.found.step)
        run.checkpoint.load(run.found)
        if run.progress.validated == run.progress.step:
            run.draw(again=False)  # it may have been lost with rank 0
    run.log.info(run.memory.summary_line(run.state.model, run.state.optimizer))
    if run.step.own_update:
        hidden_state.watch_optimizer(run.step.optimizer, run.state.names(), run.log)
    run.state.key_rng(run.world.rank)
    run.defer_worker_death_signals()


def warm_up(
    step: Step, loader: Loader, world: World, log: Log, check_structure: Callable[[], None], *,
    find_unused: bool = False, first: bool = False,
) -> float | None:
    """Collective. Compute one synchronised forward and backward of the first real micro-batch.

    DDP reorders its buckets after the first backward, which changes the bits of sums over three or
    more ranks; compilers and allocators reach their final state too. Without the warm-up, the
    first step of a resumed attempt would differ from the same step of an uninterrupted one.
    Buffers and gradients are restored afterwards.

    The warm-up also finds facts about the model: whether the loss changes its batch
    (`step.mutates_batch`), which buffers the forward changes, and whether it changes parameters
    (`step.moves_parameters`).

    Args:
        check_structure: raises if the forward has changed the names or shapes of the model's state.
        find_unused: parameters may have no gradient.
        first: nothing has been trained yet: each rank computes the micro-batch once more before,
            without synchronisation (see `rehearse`).

    Returns:
        MiB of the micro-batch's activations; None if unknown.

    Raises:
        ConfigError: the reduction or the optimizer does not support the model, or see
            `check_structure`.
    """
    step.buffers.keep()
    before = checksums(step.model.parameters())
    versions = [p._version for p in step.model.parameters()]
    micro = _copied(loader.peek())
    spec = dataclasses.replace(micro.spec, last=True)
    canonical = step.reduction is not iter
    seen = rehearse(step, world, _copied(micro), check_structure,
                    allow_unused=find_unused or canonical) if first else None
    with count_accumulations(step.parameters if canonical else ()) as times:
        activations = memory.activations(
            step.model, lambda: step.forward_backward(
                dataclasses.replace(micro, spec=spec), rehearsal=True), step.buffers.put_back)
    step.mutates_batch = any(t._version for t in batches.tensors(micro.batch))
    step.buffers.restore_storage()
    check_structure()
    _check_gradients(step, world, micro, times, find_unused=find_unused)
    step.objective.take_sums(world.size)
    step.communication.reset()
    loader.waited_s = 0.0
    _find_changed_buffers(step, world, log)
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)
    _find_changed_parameters(step, world, before, versions)
    if not step.moves_parameters and seen is not None and (
            torch.are_deterministic_algorithms_enabled()) and (
            why := hidden_state.describe_hidden_state(seen,
                                                      hidden_state.ForwardObservation.of(step))):
        log.warn_once(why)
    return activations


def _check_gradients(
    step: Step, world: World, micro: MicroBatch, times: Mapping[Tensor, int], *, find_unused: bool
) -> None:
    """Collective. Check that reduction and optimizer support the gradients of the warm-up.

    Args:
        times: how often backward has added to each parameter's gradient.
    """
    canonical = step.reduction is not iter
    if canonical:
        refuse_partial_gradients(step, world, times)
    refuse_sparse(step, world)
    if (world.size > 1 or canonical) and not find_unused:
        # The canonical reduction ignores an empty micro-batch: its gradients may be missing.
        refuse_unused(step, world, looked=not (canonical and micro.spec.number < 0))


def _find_changed_buffers(step: Step, world: World, log: Log) -> None:
    """Collective. Set in `step` which buffers the forward changes; warn of non-persistent ones."""
    step.replicated_buffers = changed = find_changed_buffers(step, world)
    step.local_buffers = find_local_buffers(step, world, changed)
    step.buffers.watch(changed)
    if world.rank == world.size - 1:  # unshared buffers are taken from this rank
        step.objective.nonfinite = step.buffers.nonfinite
    if lost := find_changed_nonpersistent_buffers(step):
        log.warn_once(f"the model's forward changes {listed(lost)}, registered with "
                     "persistent=False, so no checkpoint holds it: unless it is only a cache, a "
                     "restart gives other bits")


def _find_changed_parameters(
    step: Step, world: World, before: Tensor, versions: Sequence[int]
) -> None:
    """Collective. Set `step.moves_parameters`, and check that such a model is supported.

    Args:
        before: checksums of the parameters before the forward.
        versions: version counters of the parameters before the forward.
    """
    after = checksums(step.model.parameters())
    # Version counters also detect writes of equal values, such as a teacher equal to its student.
    written = torch.tensor([p._version != version for p, version in
                            zip(step.model.parameters(), versions, strict=True)])
    moved = world.all_sum(((after != before).cpu() | written).double())
    step.moves_parameters = bool(moved.any())
    if step.reduction is not iter:
        refuse_changed_parameters(step, moved.tolist())
    if step.moves_parameters:
        refuse_diverging_parameters(step, world, after.tolist())


def rehearse(
    step: Step, world: World, micro: MicroBatch, check_structure: Callable[[], None], *,
    allow_unused: bool
) -> hidden_state.ForwardObservation:
    """Collective. Compute a forward and backward without synchronisation.

    It finds parameters that only some ranks use: DDP would wait forever for their gradients.

    Raises:
        ConfigError: see `refuse_unused`, or `check_structure` of `warm_up`.
    """
    spec = dataclasses.replace(micro.spec, last=False)
    step.forward_backward(dataclasses.replace(micro, spec=spec), rehearsal=True)
    step.buffers.restore_storage()
    check_structure()
    if world.size > 1 and not allow_unused:
        refuse_unused(step, world)
    step.objective.accumulator.take()
    step.buffers.put_back()
    step.optimizer.zero_grad(set_to_none=True)
    return hidden_state.ForwardObservation.of(step)


def _copied(micro: MicroBatch) -> MicroBatch:
    """Copy the batch: a loss may change it in place, and training uses it again."""
    return dataclasses.replace(micro, batch=batches.copy_of(micro.batch))


def refuse_unused(step: Step, world: World, *, looked: bool = True) -> None:
    """Collective. Refuse trainable parameters without a gradient.

    DDP would wait forever for their gradients. The canonical reduction refuses them on one rank
    too, since the number of ranks may change.

    Args:
        looked: whether this rank's gradients count.

    Raises:
        ConfigError: names the parameters without a gradient on some rank.
    """
    mine = [n for n, p in step.model.named_parameters()
            if looked and p.requires_grad and p.grad is None]
    unused = sorted({name for names in world.gather_json(mine) for name in names})
    if unused:
        raise from_rank(0, ConfigError(
            f"--task: the loss of the first batch does not depend on the trainable parameters "
            f"{listed(unused)}; freeze them (requires_grad_(False)), use them, or set "
            "--parallel.find-unused on."))


@contextlib.contextmanager
def count_accumulations(parameters: Iterable[Tensor]) -> Iterator[Counter[Tensor]]:
    """Count how often a backward inside adds to each parameter's gradient."""
    times = Counter[Tensor]()

    def count(parameter: Tensor) -> None:
        times[parameter] += 1

    hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters]
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()


def refuse_partial_gradients(step: Step, world: World, times: Mapping[Tensor, int]) -> None:
    """Collective. Refuse gradients that backward accumulates in several parts.

    The canonical reduction needs each micro-batch's gradient as one sum: parts of it would be
    added one by one to the sum of earlier micro-batches.

    Raises:
        ConfigError: names the parameters with such a gradient on some rank.
    """
    mine = [n for n, p in step.model.named_parameters()
            if times.get(p, 0) > 1 or (p.grad is not None and p.grad.layout != torch.strided)]
    parts = sorted({name for names in world.gather_json(mine) for name in names})
    if parts:
        raise from_rank(0, ConfigError(
            f"--parallel.reduction canonical: the gradients of {listed(parts)} come in parts, so "
            "their sum would depend on the number of ranks: they are sparse (use sparse=False), or "
            "a nested backward adds to them too (use use_reentrant=False in checkpoint()). "
            "Or use --parallel.reduction ddp."))


def refuse_sparse(step: Step, world: World) -> None:
    """Collective. Refuse sparse gradients that the optimizer would refuse in the first update.

    Raises:
        ConfigError: names the parameters and a remedy.
    """
    sparse: dict[Tensor, str] = {p: name for name, p in step.model.named_parameters()
              if p.grad is not None and p.grad.is_sparse}
    problem = sparse_gradient_problem(step.optimizer, step.clip, sparse)
    if why := next(filter(None, world.gather_json(problem)), ""):
        raise from_rank(0, ConfigError(f"{why}."))


def refuse_changed_parameters(step: Step, moved: list[float]) -> None:
    """Refuse a forward that changes parameters, for the canonical reduction.

    The forward would change them once per micro-batch of its rank, so they would depend on the
    number of ranks.

    Args:
        moved: for each parameter, whether the forward of some rank has changed it.

    Raises:
        ConfigError: names the parameters.
    """
    names = [n for (n, _), m in zip(step.model.named_parameters(), moved, strict=True) if m]
    if names:
        raise from_rank(0, ConfigError(
            "--parallel.reduction canonical: the model's forward changes the parameters "
            f"{listed(names)}, so they would depend on the number of ranks; make them buffers "
            "(register_buffer), or use --parallel.reduction ddp."))


def refuse_diverging_parameters(step: Step, world: World, sums: list[int]) -> None:
    """Collective. Refuse a forward that changes parameters differently on each rank.

    Args:
        sums: checksums of the parameters after the forward.

    Raises:
        ConfigError: names the parameters that differ.
    """
    everywhere = world.gather_json(sums)
    names = [n for (n, _), *values in zip(step.model.named_parameters(), *everywhere, strict=True)
             if len(set(values)) > 1]
    if names:
        raise from_rank(0, ConfigError(
            f"--task: the model's forward changes the parameters {listed(names)} differently on "
            "each rank, because it depends on the samples (as max_norm of an Embedding does, and "
            "an initialisation by the first batch); do not change parameters in the forward, make "
            "them buffers, or train with one rank."))


def find_changed_buffers(step: Step, world: World) -> frozenset[Tensor]:
    """Collective. Buffers that the forward has just changed on some rank."""
    moved = torch.tensor([float(torch.any(a != b)) for a, b in step.buffers.pairs()])
    world.all_sum(moved)
    live = [b for b, _ in step.buffers.pairs()]
    return frozenset(b for b, m in zip(live, moved.tolist(), strict=True) if m)


def find_local_buffers(step: Step, world: World, moved: Container[Tensor]) -> list[Tensor]:
    """Changed buffers that neither a synchronised batch norm nor the reduction keeps equal on all
    ranks."""
    if world.size == 1:
        return []
    synchronised = (SyncBatchNorm, CudaSyncBatchNorm)
    shared = {id(b) for m in step.model.modules() if isinstance(m, synchronised)
              for b in nn.Module.buffers(m, recurse=False)}
    return [b for b, _ in step.buffers.pairs()
            if b in moved and id(b) not in shared and b not in step.shared]


def find_changed_nonpersistent_buffers(step: Step) -> list[str]:
    """Names of the buffers that the forward has just changed and that the state dict omits."""
    moved = {id(live) for live, kept in step.buffers.pairs() if bool(torch.any(live != kept))}
    held = {id(tensor) for tensor in step.model.state_dict(keep_vars=True).values()}
    return [n for n, b in step.model.named_buffers() if id(b) in moved - held]
