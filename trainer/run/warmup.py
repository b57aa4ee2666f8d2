"""Start of an attempt: warm up first, then restore, so that every attempt gives the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
from trainer.optim.named_optimizers import members_of
from trainer.optim.optimizers import sparse_gradient_problem
from trainer.run import memory, proof
from trainer.run.evaluate import Evaluator
from trainer.run.finish import best_rule
from trainer.run.run import BuiltRun, Run
from trainer.run.trial import NO_CHECKS, Observation, Trial
from trainer.step import ForwardBackward, ModelFacts, Step
from trainer.storage.layout import EMA, OPTIMIZER
from trainer.task import method_of
from trainer.telemetry.status import Phase


def _check_metric_names(built: BuiltRun) -> None:
    """Collective. Refuse, now and not an epoch later, two metrics of a validation with one name,
    and a metric of `--eval.best` or of `plateau` that no validation computes."""
    best, schedule = built.context.config.eval.best, built.state.schedule
    chosen = {name for name in (best.rpartition(":")[0], schedule.metric) if name}
    compute = built.trainable.compute
    if not built.validations:
        return
    found = _metrics(built, lambda _: compute.objective.accumulator.names or ())
    # The loss may return others in evaluation, and for each set.
    if compute.turn or not chosen <= {*found} or (chosen and len(built.validations) > 1):
        found = _metrics(built, Evaluator.first_names)
    if twice := [name for name in found if found.count(name) > 1]:
        raise ConfigError(f"--task: two metrics of a validation are named {twice[0]}; rename the "
                          "metric, or the set in validation_sets.")
    found = [name for name in found if not name.endswith("samples")]
    best_rule(best, found)
    schedule.check_metric(found)


def _metrics(built: BuiltRun, names_of: Callable[[Evaluator], Sequence[str]]) -> list[str]:
    """Names of the figures of a validation; those of the loss by `names_of` a set's evaluator."""
    found = list[str]()
    chosen = (built.context.config.eval.best.rpartition(":")[0], built.state.schedule.metric)
    for place, (split, evaluator) in enumerate(built.validations.items()):
        of_set = split.partition(":")[2]
        own = names_of(evaluator)
        for prefix in dict.fromkeys(["val_"] * (not place) + [f"val_{of_set}_"] * bool(of_set)):
            found += [prefix + name for name in ("loss", *own, *evaluator.figures,
                                                 *evaluator.states.metrics, "samples")]
            # A metric may have several values, whose names are known once it is computed.
            found += [name for name in chosen if name not in found and name.startswith(
                tuple(f"{prefix}{metric}_" for metric in evaluator.states.metrics))]
    return found


def start(built: BuiltRun) -> Run:
    """Collective. Warm up, then restore the checkpoint from which the run continues."""
    context, setup, trainable = built.context, built.setup, built.trainable
    state, found = trainable.state, built.resumption.found
    facts, trial = ModelFacts(), None
    if state.progress.step < setup.intervals.total:
        context.status.enter(Phase.WARM_UP)
        with context.world.long_timeout():
            facts, trial = warm_up(built)
        if not facts.moves_parameters:
            trainable.boundary.note_constant_parameters()
        _check_metric_names(built)
    if found is not None:
        context.status.enter(Phase.RESTORE)
        context.marks.mark(Phase.RESTORE, found.step)
        trainable.checkpoint.load(found)
        if state.progress.validated == state.progress.step:
            built.recorders.draw(found.step, again=False)  # it may have been lost with rank 0
    context.log.info(memory.summary_line(state.model, state.optimizer, facts.activations_mb))
    step = _make_step(built, facts, trial)
    if step.own_update:
        proof.watch_optimizer(state)
    state.key_rng(context.world.rank)
    built.guard.defer_worker_death_signals()
    replica_check = ReplicaCheck(partial(_replicated, state, trainable.boundary.buffers),
                                 context.world, built.resumption.position)
    return Run(**vars(built), step=step, replica_check=replica_check)


def warm_up(built: BuiltRun) -> tuple[ModelFacts, Trial | None]:
    """Collective. Compute one synchronised forward and backward of the first real micro-batch, for
    each turn, and restore buffers and gradients afterwards.

    DDP reorders its buckets after the first backward, which changes the bits of sums over three or
    more ranks: the first step of a resumed attempt would differ from that of an unbroken run.
    """
    found = [_warm_up(built, compute) for compute in built.trainable.computes]
    mutates, moves, sizes, trials = zip(*found, strict=True)
    return ModelFacts(mutates_batch=any(mutates), moves_parameters=any(moves),
                      activations_mb=max((mb for mb in sizes if mb is not None), default=None)
                      ), trials[0]


def _warm_up(
    built: BuiltRun, compute: ForwardBackward
) -> tuple[bool, bool, float | None, Trial | None]:
    """Collective. See `ModelFacts`; with the trial of the first samples, in the first steps of a
    run."""
    world, trainable = built.context.world, built.trainable
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
    # From here on the watchdog is patient: the first forward of a process may take long.
    compute.marks.rehearse(Phase.FORWARD, micro.spec.step, micro.spec.epoch)
    trial = first = None
    if state.progress.step <= built.trainable.computes.two_updates:
        trial = Trial(built, compute, replace(micro, batch=batches.copy_of(micro.batch)))
        trial.prove_sums()
        first = _rehearse(built, compute, replace(micro, batch=batches.copy_of(micro.batch)),
                          may_be_unused=find_unused or not (world.size > 1 or canonical))
    synced = replace(micro, spec=replace(micro.spec, last=True))
    with Observation.of(compute, deep=trial is not None) as second:
        activations = memory.activations(model, partial(compute, synced, rehearsal=True))
    if first is not None and built.context.config.start_checks == "on":
        made = {leaf() for leaf, _ in first.foreign} - {None, *batches.tensors(micro.batch)}
        _refuse_on_all_ranks([text for leaf, text in second.foreign if leaf() in made], world,
                             f"--task: {proof.FOREIGN} {NO_CHECKS}")
    mutates_batch = batches.has_objects(micro.batch) or batches.versions(micro.batch) != tensors
    buffers.restore_storage()
    state.check_structure()
    if canonical:
        _refuse_partial_gradients(model, world, second)
    _refuse_sparse_gradients(built)
    objective.take_sums(world.size)
    compute.communication.reset()
    built.loader.forget_wait()
    buffers.agree(world)
    state.optimizer.zero_grad(set_to_none=True)
    moves = _moves_parameters(model, world, before, versions, canonical=canonical)
    if trial is not None and first is not None and not moves:
        buffers.put_back_saved()
        trial.compare(first, second)
    buffers.put_back()
    return mutates_batch, moves, activations, trial


def _rehearse(
    built: BuiltRun, compute: ForwardBackward, micro: MicroBatch, *, may_be_unused: bool
) -> Observation:
    """Collective. Compute a forward and backward without synchronisation, to find parameters that
    only some ranks use: DDP would wait forever for their gradients."""
    world, log = built.context.world, built.context.log
    state, buffers = built.state, built.trainable.boundary.buffers
    with Observation.of(compute) as seen:
        compute(replace(micro, spec=replace(micro.spec, last=False)), rehearsal=True)
    buffers.restore_storage()
    state.check_structure()
    others = set(compute.of.others)
    unused = [n for n, p in compute.model.named_parameters()
              if p.requires_grad and p.grad is None and p not in others]
    if not may_be_unused:
        of = f" in the turn {compute.turn!r}" * bool(compute.turn)
        _refuse_on_all_ranks(
            unused, world,
            f"--task: the loss of the first batch{of} does not depend on the trainable parameters "
            "{}; freeze them (requires_grad_(False)), use them, or set --parallel.find-unused on.")
    elif unused and built.context.config.parallel.find_unused == "off":
        log.warn_once(
            f"the loss of the first batch gives no gradient to {listed(unused)}, so it is not "
            "trained: use it, or freeze it (requires_grad_(False)). checkpoint() stops gradients "
            "if no input has one, unless it has use_reentrant=False")
    compute.objective.accumulator.take()
    buffers.put_back_saved()
    state.optimizer.zero_grad(set_to_none=True)
    return seen


def _refuse_partial_gradients(model: nn.Module, world: World, seen: Observation) -> None:
    """Collective. Refuse gradients to which backward has added several times: the canonical
    reduction would add the parts one by one to the sum of earlier micro-batches."""
    _refuse_on_all_ranks(
        [n for n, p in model.named_parameters()
         if len(seen.gradients.get(n, ())) > 1 or (
             p.grad is not None and p.grad.layout != torch.strided)], world,
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


def _make_step(built: BuiltRun, facts: ModelFacts, trial: Trial | None) -> Step:
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
        trial=None if trial is None else trial.repeat,
        after_step=method_of(built.setup.task, "after_step"),
        nan_detector=detect_nan if config.numerics.anomaly == "on" else None)


def _replicated(state: TrainState, buffers: Buffers) -> dict[str, Tensor]:
    """Tensors that must be equal on all ranks."""
    parameters, tensors = dict(state.model.named_parameters()), state.tensors()
    average = {f"average of {name}": tensor for name, tensor in tensors.get(EMA, {}).items()}
    return parameters | buffers.replicated() | tensors[OPTIMIZER] | average
