"""Start of an attempt: warm up first, then restore, so that every attempt gives the same bits."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.checkpoint.train_state import TrainState
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, MicroBatch
from trainer.data.sample_errors import summarize_exception
from trainer.data.sampler import MicroBatchSpec
from trainer.distributed import torch_private
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.replica_check import ReplicaCheck, checksums
from trainer.distributed.torch_private import version
from trainer.distributed.world import World
from trainer.errors import ConfigError, from_rank, listed
from trainer.optim import nan_detection
from trainer.optim.named_optimizers import members_of
from trainer.optim.optimizers import sparse_gradient_problem
from trainer.run import memory, proof
from trainer.run.finish import best_rule
from trainer.run.model_modes import eval_mode
from trainer.run.prepare import Setup, content
from trainer.run.run import BuiltRun, Run
from trainer.step import ForwardBackward, ModelFacts, Step
from trainer.storage.layout import EMA, OPTIMIZER
from trainer.task import Outcome, check_outcome
from trainer.telemetry.status import Phase

NO_CHECKS = "(--start-checks off trains without this check.)"


def _validation_metrics(built: BuiltRun) -> list[str]:
    """Names of the metrics of a validation, before the first one."""
    names = ["loss", *_metric_names(built)]
    sets = [split.partition(":")[2] for split in built.validations]
    prefixes = ["val_", *(f"val_{name}_" for name in sets if name)]
    first = next(iter(built.validations.values()), None)
    objects = [] if first is None else [*first.states.metrics]
    names += [] if first is None else [*first.figures, *objects]
    found = [prefix + name for prefix in prefixes for name in (*names, "samples")]
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"--task: two metrics of a validation are named {twice[0]}; rename the "
                          "metric, or the set in validation_sets.")
    # A metric may have several values, whose names are known once it is computed.
    chosen = (built.context.config.eval.best.rpartition(":")[0], built.state.schedule.metric)
    parts = [name for name in chosen if name and name.startswith(
        tuple(f"{prefix}{own}_" for prefix in prefixes for own in objects))]
    return [name for name in found if not name.endswith("samples")] + parts


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
        metrics = _validation_metrics(built)
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
        proof.watch_optimizer(state, context.log)
    state.key_rng(context.world.rank)
    built.guard.defer_worker_death_signals()
    replica_check = ReplicaCheck(partial(_replicated, state, trainable.boundary.buffers),
                                 context.world, built.resumption.position)
    return Run(**vars(built), step=step, replica_check=replica_check)


def _metric_names(built: BuiltRun) -> Sequence[str]:
    """Names of the metrics of a validation: those of the training, or, if that has turns, those of
    the first micro-batch in evaluation."""
    compute, model = built.trainable.compute, built.setup.model
    if not compute.turn or not built.validations:
        return compute.objective.accumulator.names or ()
    batch = batches.copy_of(built.loader.peek().batch)
    with (eval_mode(model), torch_private.uncompiled(model), torch.no_grad(), compute.autocast(),
          Buffers(model).preserved()):
        return tuple(check_outcome(built.setup.task.loss(model, batch))[1])


def warm_up(built: BuiltRun) -> ModelFacts:
    """Collective. Compute one synchronised forward and backward of the first real micro-batch, for
    each turn, and restore buffers and gradients afterwards.

    DDP reorders its buckets after the first backward, which changes the bits of sums over three or
    more ranks: the first step of a resumed attempt would differ from that of an unbroken run.
    """
    facts = [_warm_up(built, compute) for compute in built.trainable.computes]
    sizes = [one.activations_mb for one in facts if one.activations_mb is not None]
    return ModelFacts(mutates_batch=any(one.mutates_batch for one in facts),
                      moves_parameters=any(one.moves_parameters for one in facts),
                      activations_mb=max(sizes, default=None))


def _warm_up(built: BuiltRun, compute: ForwardBackward) -> ModelFacts:
    """Collective. See `warm_up`."""
    world, log, trainable = built.context.world, built.context.log, built.trainable
    state, buffers = trainable.state, trainable.boundary.buffers
    model, objective = compute.model, compute.objective
    canonical = isinstance(compute.reduction, RankInvariantReduction)
    find_unused = built.context.config.parallel.find_unused == "on"
    buffers.keep()
    before = checksums(model.parameters())
    versions = [version(p) for p in model.parameters()]
    micro = built.loader.peek()  # a loss may change its batch, and training uses it again: copy it
    if "epoch" in state.parts:
        state.parts["epoch"].enter(micro.spec.epoch)
    micro = replace(micro, batch=batches.copy_of(micro.batch))
    tensors = batches.versions(micro.batch)
    seen = None
    if built.resumption.found is None:
        checks = built.context.config.start_checks == "on"
        if checks:
            _prove_sums(built, compute, micro)
        seen = _rehearse(built, compute, replace(micro, batch=batches.copy_of(micro.batch)),
                         allow_unused=find_unused or canonical, checks=checks)
    times = Counter[Tensor]()  # how often the backward adds to each parameter's gradient
    hooks = [p.register_post_accumulate_grad_hook(lambda p: times.update([p]))
             for p in compute.parameters if canonical]
    synced = replace(micro, spec=replace(micro.spec, last=True))
    activations = memory.activations(model, partial(compute, synced, rehearsal=True))
    for hook in hooks:
        hook.remove()
    mutates_batch = batches.has_objects(micro.batch) or batches.versions(micro.batch) != tensors
    buffers.restore_storage()
    state.check_structure()
    if canonical:
        _refuse_partial_gradients(model, world, times)
    _refuse_sparse_gradients(built)
    if (world.size > 1 or canonical) and not find_unused:
        _refuse_unused(compute, world)
    objective.take_sums(world.size)
    compute.communication.reset()
    built.loader.forget_wait()
    buffers.agree(world)
    buffers.put_back()
    state.optimizer.zero_grad(set_to_none=True)
    moves = _moves_parameters(model, world, before, versions, canonical=canonical)
    if not moves and seen is not None and torch.are_deterministic_algorithms_enabled() and (
            why := proof.describe_hidden_state(
                seen, proof.ForwardObservation.of(objective))):
        log.warn_once(why)
    return ModelFacts(mutates_batch=mutates_batch, moves_parameters=moves,
                      activations_mb=activations)


def _prove_sums(built: BuiltRun, compute: ForwardBackward, micro: MicroBatch) -> None:
    """Collective. Refuse a loss that differs between a micro-batch and its two halves, in eval mode
    (dropout and batch statistics may depend on them, as may buffers that change in eval mode)."""
    context, setup, objective = built.context, built.setup, compute.objective
    world, model = context.world, setup.model
    buffers = Buffers(model)

    def outcome(batch: Any, key: int) -> Outcome:
        rng.seed_all(context.config.seed, rng.MICRO, key)
        rng.key(rng.find_generators(*model.modules(), objective.loss), key)
        with buffers.preserved(), torch.no_grad():
            outcome = objective.loss(model, batches.copy_of(batch))
        for evaluator in () if compute.turn else built.validations.values():
            for name in evaluator.states.metrics:
                evaluator.states.arguments(name, outcome.predictions)
        return outcome

    halves = world.fail_together(partial(_halves, setup, micro, context.config.seed))
    if any(world.gather_json(halves is None)) or halves is None:  # the loss may communicate
        return
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    with eval_mode(model), torch_private.uncompiled(model):
        try:
            problems = proof.unequal_sums(outcome, micro.batch, halves,
                                          tolerance=max(1e-3, 8 * eps))
        except Exception as error:
            if built.validations and not compute.turn:  # an evaluation gives no turn
                raise
            problems = []
            context.log.warn_once("the loss can't be computed in eval mode, so it isn't checked "
                                  f"that it is a sum ({summarize_exception(error)})")
    mine = [] if buffers.moved() else problems
    if found := [problem for rank in world.gather_json(mine) for problem in rank]:
        raise from_rank(0, ConfigError(f"--task: {found[0]}: {proof.SUMS} {NO_CHECKS}"))


def _halves(setup: Setup, micro: MicroBatch, seed: int) -> tuple[Any, Any] | None:
    """The samples of a micro-batch in two batches; None if it can't be divided, or has other
    samples when it is read again."""
    middle, data = micro.samples // 2, setup.data["train"]
    device = next(setup.model.parameters()).device
    if not middle or micro.replaced:
        return None
    if isinstance(data, IterableDataset):
        if batches.has_objects(micro.batch) or any(
                len(t) != micro.samples for t in batches.tensors(micro.batch) if t.dim()):
            return None
        return (batches.map_tensors(lambda t: t[:middle] if t.dim() else t, micro.batch),
                batches.map_tensors(lambda t: t[middle:] if t.dim() else t, micro.batch))
    reader, indices = KeyedSamples(data, seed=seed, collate=setup.collate), micro.spec.indices
    one, other, again = (reader[replace(micro.spec, indices=part)].batch
                         for part in (indices[:middle], indices[middle:], indices))
    if content(again) != content(micro.batch):
        return None
    return batches.to_device(one, device), batches.to_device(other, device)


def _rehearse(
    built: BuiltRun, compute: ForwardBackward, micro: MicroBatch, *, allow_unused: bool,
    checks: bool,
) -> proof.ForwardObservation:
    """Collective. Compute a forward and backward without synchronisation, to find parameters that
    only some ranks use: DDP would wait forever for their gradients."""
    world, log = built.context.world, built.context.log
    state, buffers = built.state, built.trainable.boundary.buffers
    foreign: list[tuple[Any, str]] = []

    def look(outcome: Outcome) -> None:
        foreign.extend(proof.foreign_leaves(check_outcome(outcome)[0], compute.model))

    with compute.objective.watched(look if checks else None):
        compute(replace(micro, spec=replace(micro.spec, last=False)), rehearsal=True)
    buffers.restore_storage()
    state.check_structure()
    if checks:
        inputs = set(batches.tensors(micro.batch))
        lasting = [text for leaf, text in foreign if leaf() is not None and leaf() not in inputs]
        _refuse_on_all_ranks(lasting, world, f"--task: {proof.FOREIGN} {NO_CHECKS}")
    if not allow_unused and world.size > 1:
        _refuse_unused(compute, world)
    elif unused := _without_gradient(compute):
        log.warn_once(
            f"the loss of the first batch gives no gradient to {listed(unused)}, so it is not "
            "trained: use it, or freeze it (requires_grad_(False)). checkpoint() stops gradients "
            "if no input has one, unless it has use_reentrant=False")
    compute.objective.accumulator.take()
    buffers.put_back()
    state.optimizer.zero_grad(set_to_none=True)
    return proof.ForwardObservation.of(compute.objective)


def _without_gradient(compute: ForwardBackward) -> list[str]:
    others = set(compute.of.others)
    return [n for n, p in compute.model.named_parameters()
            if p.requires_grad and p.grad is None and p not in others]


def _refuse_unused(compute: ForwardBackward, world: World) -> None:
    """Collective. Refuse trainable parameters without a gradient."""
    of = f" in the turn {compute.turn!r}" * bool(compute.turn)
    _refuse_on_all_ranks(
        _without_gradient(compute), world,
        f"--task: the loss of the first batch{of} does not depend on the trainable parameters "
        "{}; freeze them (requires_grad_(False)), use them, or set --parallel.find-unused on.")


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
    problems = [sparse_gradient_problem(
        member.optimizer, member.clip or built.context.config.clip,
        {p: n for p, n in sparse.items() if p in member.parameters} if name else sparse)
        for name, member in members_of(built.setup.optimizer).items()]
    _refuse_on_all_ranks([*filter(None, problems)][:1], built.context.world, "{}.")


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
        computes=trainable.computes, state=trainable.state, boundary=trainable.boundary,
        facts=facts, world=context.world, health=trainable.health, clip=config.clip,
        status=context.status, min_samples=min_samples,
        after_step=getattr(built.setup.task, "after_step", None),
        nan_detector=detect_nan if config.numerics.anomaly == "on" else None)


def _replicated(state: TrainState, buffers: Buffers) -> dict[str, Tensor]:
    """Tensors that must be equal on all ranks."""
    parameters, tensors = dict(state.model.named_parameters()), state.tensors()
    average = {f"average of {name}": tensor for name, tensor in tensors.get(EMA, {}).items()}
    return parameters | buffers.replicated() | tensors[OPTIMIZER] | average
