"""Start of an attempt: warm up first, then restore, so that every attempt gives the same bits."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer.checkpoint.buffers import Buffers
from trainer.checkpoint.train_state import TrainState
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.replica_check import ReplicaCheck, checksums
from trainer.distributed.torch_private import version
from trainer.distributed.world import World
from trainer.errors import ConfigError, from_rank, listed
from trainer.optim import nan_detection
from trainer.optim.optimizers import sparse_gradient_problem
from trainer.run import hidden_state, memory
from trainer.run.finish import best_rule
from trainer.run.run import BuiltRun, Run, Trainable
from trainer.step import ModelFacts, Step
from trainer.storage.layout import EMA, OPTIMIZER
from trainer.telemetry.status import Phase


def start(built: BuiltRun) -> Run:
    """Collective. Warm up, then restore the checkpoint from which the run continues."""
    context, setup, trainable = built.context, built.setup, built.trainable
    state, found = trainable.state, built.resumption.found
    facts = ModelFacts()
    if state.progress.step < setup.intervals.total:
        context.status.enter(Phase.WARM_UP)
        with context.world.long_timeout():
            facts = warm_up(built)
        if not facts.moves_parameters:
            trainable.boundary.note_constant_parameters()
        names = [*(trainable.compute.objective.accumulator.names or ()),
                 *(built.validation.figures if built.validation is not None else ())]
        metrics = ["val_loss", *(f"val_{name}" for name in names)]
        best_rule(context.config.eval.best, metrics)  # fails now, not an epoch later
        state.schedule.check_metric(metrics)
    if found is not None:
        context.status.enter(Phase.RESTORE)
        context.marks.mark(Phase.RESTORE, found.step)
        trainable.checkpoint.load(found)
        if state.progress.validated == state.progress.step:
            built.recorders.draw(found.step, again=False)  # it may have been lost with rank 0
    context.log.info(memory.summary_line(state.model, state.optimizer, facts.activations_mb))
    step = _make_step(built, facts)
    if step.own_update:
        hidden_state.watch_optimizer(state.optimizer, state.names(), context.log)
    state.key_rng(context.world.rank)
    built.guard.defer_worker_death_signals()
    replica_check = ReplicaCheck(partial(_replicated, state, trainable.boundary.buffers),
                                 context.world, built.resumption.position)
    return Run(**vars(built), step=step, replica_check=replica_check)


def warm_up(built: BuiltRun) -> ModelFacts:
    """Collective. Compute one synchronised forward and backward of the first real micro-batch, and
    restore buffers and gradients afterwards.

    DDP reorders its buckets after the first backward, which changes the bits of sums over three or
    more ranks: the first step of a resumed attempt would differ from that of an unbroken run.
    """
    world, log, trainable = built.context.world, built.context.log, built.trainable
    compute, state, buffers = trainable.compute, trainable.state, trainable.boundary.buffers
    model, objective = compute.model, compute.objective
    canonical = isinstance(trainable.reduction, RankInvariantReduction)
    find_unused = built.context.config.parallel.find_unused == "on"
    buffers.keep()
    before = checksums(model.parameters())
    versions = [version(p) for p in model.parameters()]
    micro = built.loader.peek()  # a loss may change its batch, and training uses it again: copy it
    micro = replace(micro, batch=batches.copy_of(micro.batch))
    seen = None
    if built.resumption.found is None:
        seen = _rehearse(trainable, replace(micro, batch=batches.copy_of(micro.batch)), world,
                         allow_unused=find_unused or canonical)
    times = Counter[Tensor]()  # how often the backward adds to each parameter's gradient
    hooks = [p.register_post_accumulate_grad_hook(lambda p: times.update([p]))
             for p in compute.parameters if canonical]
    synced = replace(micro, spec=replace(micro.spec, last=True))
    activations = memory.activations(model, partial(compute, synced, rehearsal=True))
    for hook in hooks:
        hook.remove()
    mutates_batch = any(version(t) for t in batches.tensors(micro.batch))
    buffers.restore_storage()
    state.check_structure()
    if canonical:
        _refuse_partial_gradients(model, world, times)
    _refuse_sparse_gradients(built)
    if (world.size > 1 or canonical) and not find_unused:
        # The canonical reduction ignores an empty micro-batch: its gradients may be missing.
        _refuse_unused(model, world, looked=not (canonical and micro.spec.number < 0))
    objective.take_sums(world.size)
    compute.communication.reset()
    built.loader.forget_wait()
    buffers.agree(world)
    buffers.put_back()
    state.optimizer.zero_grad(set_to_none=True)
    moves = _moves_parameters(model, world, before, versions, canonical=canonical)
    if not moves and seen is not None and torch.are_deterministic_algorithms_enabled() and (
            why := hidden_state.describe_hidden_state(
                seen, hidden_state.ForwardObservation.of(objective))):
        log.warn_once(why)
    return ModelFacts(mutates_batch=mutates_batch, moves_parameters=moves,
                      activations_mb=activations)


def _rehearse(
    trainable: Trainable, micro: MicroBatch, world: World, *, allow_unused: bool
) -> hidden_state.ForwardObservation:
    """Collective. Compute a forward and backward without synchronisation, to find parameters that
    only some ranks use: DDP would wait forever for their gradients."""
    compute, state, buffers = trainable.compute, trainable.state, trainable.boundary.buffers
    compute(replace(micro, spec=replace(micro.spec, last=False)), rehearsal=True)
    buffers.restore_storage()
    state.check_structure()
    if world.size > 1 and not allow_unused:
        _refuse_unused(compute.model, world)
    compute.objective.accumulator.take()
    buffers.put_back()
    state.optimizer.zero_grad(set_to_none=True)
    return hidden_state.ForwardObservation.of(compute.objective)


def _refuse_unused(model: nn.Module, world: World, *, looked: bool = True) -> None:
    """Collective. Refuse trainable parameters without a gradient, on this rank if it `looked`."""
    _refuse_on_all_ranks(
        [n for n, p in model.named_parameters() if looked and p.requires_grad and p.grad is None],
        world,
        "--task: the loss of the first batch does not depend on the trainable parameters {}; "
        "freeze them (requires_grad_(False)), use them, or set --parallel.find-unused on.")


def _refuse_partial_gradients(model: nn.Module, world: World, times: Counter[Tensor]) -> None:
    """Collective. Refuse gradients to which backward has added several `times`: the canonical
    reduction would add the parts one by one to the sum of earlier micro-batches."""
    _refuse_on_all_ranks(
        [n for n, p in model.named_parameters()
         if times[p] > 1 or (p.grad is not None and p.grad.layout != torch.strided)], world,
        "--parallel.reduction canonical: the gradients of {} come in parts, so their sum would "
        "depend on the number of ranks: they are sparse (use sparse=False), or a nested backward "
        "adds to them too (use use_reentrant=False in checkpoint()). Or use --parallel.reduction "
        "ddp.")


def _refuse_on_all_ranks(mine: Sequence[str], world: World, message: str) -> None:
    """Collective. Raise ConfigError on all ranks if any rank names a parameter."""
    names = sorted({name for names in world.gather_json(list(mine)) for name in names})
    if names:
        raise from_rank(0, ConfigError(message.format(listed(names))))


def _refuse_sparse_gradients(built: BuiltRun) -> None:
    """Collective. Refuse sparse gradients that the optimizer would refuse in the first update."""
    sparse: dict[Tensor, str] = {p: name for name, p in built.setup.model.named_parameters()
                                 if p.grad is not None and p.grad.is_sparse}
    problem = sparse_gradient_problem(built.setup.optimizer, built.context.config.clip, sparse)
    if why := next(filter(None, built.context.world.gather_json(problem)), ""):
        raise from_rank(0, ConfigError(f"{why}."))


def _moves_parameters(
    model: nn.Module, world: World, before: Tensor, versions: Sequence[int], *, canonical: bool
) -> bool:
    """Collective. Whether the forward changes parameters on some rank: their checksums `before` it
    or their `versions`. Raises ConfigError if ranks would differ, or their number would matter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    after = checksums(parameters)
    # Version counters also detect writes of equal values, such as a teacher equal to its student.
    written = torch.tensor([version(p) != old for p, old in zip(parameters, versions, strict=True)])
    moved = world.all_sum(((after != before).cpu() | written).double()).tolist()
    if not any(moved):
        return False
    if canonical:
        changed = listed(n for n, m in zip(names, moved, strict=True) if m)
        raise from_rank(0, ConfigError(
            f"--parallel.reduction canonical: the model's forward changes the parameters {changed},"
            " so they would depend on the number of ranks; make them buffers (register_buffer), or "
            "use --parallel.reduction ddp."))
    everywhere = world.gather_json(after.tolist())
    differing = [n for n, *sums in zip(names, *everywhere, strict=True) if len(set(sums)) > 1]
    if differing:
        raise from_rank(0, ConfigError(
            f"--task: the model's forward changes the parameters {listed(differing)} differently "
            "on each rank, because it depends on the samples (as max_norm of an Embedding does); "
            "make them buffers, or train with one rank."))
    return True


def _make_step(built: BuiltRun, facts: ModelFacts) -> Step:
    context, trainable, config = built.context, built.trainable, built.context.config
    log, compute = context.log, trainable.compute

    def detect_nan(spec: MicroBatchSpec) -> contextlib.AbstractContextManager[None]:
        def report(origin: nan_detection.Origin) -> None:
            log.event("anomaly", at_step=spec.step, micro_batch=spec.number, **vars(origin))
            log.warning(f"step {spec.step}, micro-batch {spec.number}: a NaN is made by {origin}")

        return nan_detection.nan_detector(compute.wrapped, compute.model, report)

    min_samples = 0
    if isinstance(built.setup.data["train"], IterableDataset):
        # The length of an epoch is unknown: the first incomplete window ends it.
        min_samples = config.batch.global_size if config.data.drop_last == "on" else 1
    return Step(
        compute=compute, state=trainable.state, boundary=trainable.boundary, facts=facts,
        world=context.world, health=trainable.health, clip=config.clip,
        status=context.status, reduction=trainable.reduction, min_samples=min_samples,
        nan_detector=detect_nan if config.numerics.anomaly == "on" else None)


def _replicated(state: TrainState, buffers: Buffers) -> dict[str, Tensor]:
    """Tensors that must be equal on all ranks."""
    parameters, tensors = dict(state.model.named_parameters()), state.tensors()
    average = {f"average of {name}": tensor for name, tensor in tensors.get(EMA, {}).items()}
    return parameters | buffers.replicated() | tensors[OPTIMIZER] | average
