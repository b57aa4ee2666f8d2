"""Checks of a `Task` before training: errors that would otherwise appear late or silently."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.buffers import take_shapes
from trainer.checkpoint.progress import BestTracker, EpochCalls, LossMeter, TrainProgress
from trainer.checkpoint.train_state import TrainState, copy_into, model_tensors
from trainer.config.schema import Optim
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, MicroBatch, begin_epoch
from trainer.data.sample_errors import summarize_exception
from trainer.data.sampler import MicroBatchSpec
from trainer.data.stream_reader import StreamSpec
from trainer.distributed.ddp import Objective
from trainer.errors import ConfigError, listed
from trainer.optim import optimizers
from trainer.optim.named_optimizers import optimizer_of
from trainer.run.metric_states import MetricStates
from trainer.run.model_modes import set_training
from trainer.run.prepare import content
from trainer.run.proof import (
    FOREIGN,
    SUMS,
    check_state_dict,
    differing,
    foreign_leaves,
    unequal_sums,
    values,
)
from trainer.run.stream_proof import prove_stream, remedies
from trainer.run.trial import divided
from trainer.step import Step, TurnParameters
from trainer.task import (
    Outcome,
    check_outcome,
    check_signatures,
    first_batch,
    method_of,
    splits_of,
    task_figures,
    uncalled_methods,
)

SEED = 0
TOLERANCE = 1e-5
"""Tolerance for float32 rounding between the sum over a batch and the sums over its halves,
relative to max(1, |sum|)."""


def check_items(task: Any, batch_size: int) -> Iterator[str]:
    """The problems of a task's samples, one sentence each."""
    for split in splits_of(task):
        try:
            dataset, again = (dataset_of(task, split) for _ in range(2))
            if dataset is None or (hasattr(dataset, "__len__") and not len(dataset)):
                if split == "train":
                    yield ('dataset("train") has no samples: it must have some; only "validation" '
                           'and "test" may be None.')
                continue
            first, later, second = (  # another epoch in between, as in a run
                content(read_items(task, dataset, range(batch_size), epoch=e)) for e in (0, 1, 0))
            fresh = [content(read_items(task, again, range(batch_size), epoch=e)) for e in (1, 0)]
        except Exception as error:
            yield raised(f'reading dataset("{split}")', error)
            continue
        is_stream = isinstance(dataset, IterableDataset)
        if is_stream and split == "train" and (why := _state_problem(task, batch_size)):
            yield why
        if first != second and is_stream:
            yield (f'the stream dataset("{split}") returns different samples in a second '
                   "iteration: start each iter() from the beginning, keep the position in the "
                   "iterator (which may have a state_dict) and not in the data set, and draw from "
                   "random, numpy.random, torch or a generator that is an attribute of it.")
        elif first != second:
            yield (f'samples of dataset("{split}") differ when they are read again under the same '
                   "key: draw from random, numpy.random, torch, a generator that is an attribute "
                   "of the data set, or `indices.keys`; and don't count reads.")
        elif [later, first] != fresh:
            yield (f'samples of dataset("{split}") differ between two data sets created one after '
                   "the other and read in different order: a restarted run would train on other "
                   "data.")


def _state_problem(task: Any, batch_size: int) -> str:
    """What is wrong with the states of a training stream; "" if nothing is."""
    spec = StreamSpec(dataset=dataset_of(task, "train"), lanes=2, micro_size=batch_size, seed=SEED)
    proof = prove_stream(spec, range(2), daemon=False)
    if proof.problem:
        return f"{proof.problem}. {remedies(usable=proof.usable, unlike=proof.unlike)}"
    return f"{proof.unlike}, so a restarted run would train on other data." * bool(proof.unlike)


def dataset_of(task: Any, split: str) -> Any:
    """A split's data set, created as in a run."""
    rng.seed_all(SEED, rng.DATA)
    return task.dataset(split)


def read_items(task: Any, dataset: Any, which: Sequence[int], *, epoch: int = 0) -> Any:
    """Read a batch of the samples with these numbers (fewer at the end), as the loader does."""
    collate = method_of(task, "collate") or batches.collate
    if isinstance(dataset, IterableDataset):
        begin_epoch(dataset, epoch, seed=SEED)
        generators, items = rng.find_generators(dataset, collate), list[Any]()
        for most in (max(which) + 1, 0):  # what `collate` draws doesn't depend on what was read
            rng.seed_all(SEED, rng.SAMPLE, epoch)
            rng.key(generators, SEED, rng.SAMPLE, epoch)
            items += [item for item, _ in zip(dataset, range(most), strict=False)]
        return batches.collated(collate, [items[i] for i in which if i < len(items)])
    indices = tuple(i for i in which if i < len(dataset))
    return KeyedSamples(dataset, seed=SEED, collate=collate, same_draws=True)[
        MicroBatchSpec(1, epoch, 0, True, indices)].batch


def raised(doing: str, error: Exception) -> str:
    """An operation and the exception it raised, in one line."""
    return f"{doing} raised {summarize_exception(error)}"


def check_task(task: Any, *, batch_size: int = 4) -> None:
    """Check the requirements on a task for exact restarts and for any number of ranks.

    Runs on the CPU with the first `batch_size` samples of each split, and checks that
    - samples are reproducible under the same key;
    - the states of a training stream bring back the samples that follow;
    - the loss is finite, has a graph, and is a sum, as metrics are;
    - gradients reach every trainable parameter;
    - a training step works with the task's parameter groups;
    - the model and the task have no state that a checkpoint doesn't contain.

    Args:
        task: an instance of the task.
        batch_size: samples per batch, at least 2 if the data set has that many.

    Raises:
        AssertionError: lists every problem found, one sentence each.
    """
    assert not isinstance(task, type), f"give an instance: check_task({task.__name__}())"
    with rng.preserved():
        problems = list(dict.fromkeys(_problems(task, batch_size)))  # without duplicates
    if problems:
        found = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise AssertionError("\n- ".join([f"{type(task).__name__} has {found}:", *problems]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """A task under test, and the batches to test it with."""

    task: Any
    size: int
    whole: Any
    """A batch of `size` samples."""
    other: Any
    """Another batch; `whole` if the data set has no more samples."""
    parts: list[Any]
    """`whole` in two batches, and in reverse order; empty for a single sample, or if it is random
    and can't be cut."""
    turn: str = ""
    """The turn whose loss is tested, if the task has turns."""

    def model(self, task: Any = None) -> nn.Module:
        """A new model in training mode, with the same weights in each call."""
        rng.seed_all(SEED, rng.MODEL)
        model = (task or self.task).model()
        set_training(model)
        return model

    def outcome(self, model: nn.Module, batch: Any, *, key: int = 0, task: Any = None) -> Outcome:
        loss = self.loss(task or self.task)
        rng.seed_all(SEED, rng.MICRO, key)
        rng.key(rng.find_generators(*model.modules(), loss), SEED, rng.MICRO, key)
        return loss(model, batch)

    def loss(self, task: Any) -> Callable[[nn.Module, Any], Outcome]:
        return partial(task.loss, turn=self.turn) if self.turn else task.loss


def _problems(task: Any, batch_size: int) -> list[str]:
    try:  # like the task that a restarted process creates from its flags
        pristine = copy.deepcopy(task)
    except TypeError:  # it contains something that can't be copied, such as a lock or a file
        pristine = task
    problems = list(check_items(task, batch_size))
    irreproducible = bool(problems)
    problems += [unused] if (unused := uncalled_methods(task)) else []
    try:
        check_signatures(task)
        task_figures(task)
        MetricStates(task, torch.device("cpu"))
        for one in (task, pristine):
            if call := method_of(one, "epoch"):
                EpochCalls(call, SEED).enter(0)
        case = _case(task, batch_size)
    except Exception as error:
        return problems or [str(error).removeprefix("--task: ") if isinstance(error, ConfigError)
                            else raised("reading the first samples", error)]
    turns = dict.fromkeys(getattr(task, "turns", ()) if method_of(task, "optimizers") else ())
    for turn in turns or ("",):
        case = dataclasses.replace(case, turn=turn)
        if _check_turn(case, problems, irreproducible=irreproducible):
            return problems  # the other checks would fail for the same reason
    try:
        return problems + list(_check_state(case, pristine))
    except Exception as error:
        return [*problems, raised("a second training forward", error)]


def _check_turn(case: _Case, problems: list[str], *, irreproducible: bool) -> bool:
    """Add the problems of a turn, or of a task without turns; whether no more can be checked."""
    for check in (_check_model, _check_loss, _check_gradients, _check_sums, _check_step):
        if irreproducible and check is _check_sums:
            continue  # its batches may have different samples
        before = len(problems)
        try:
            problems += check(case)
        except Exception as error:
            problem = raised(check.__name__.replace("_check_", "checking the "), error)
            if problem.partition(" raised ")[2] not in " ".join(problems):
                problems.append(problem)
        if check in (_check_model, _check_loss) and len(problems) > before:
            return True
    return False


def _case(task: Any, batch_size: int) -> _Case:
    data = dataset_of(task, "train")
    known = len(data) if hasattr(data, "__len__") else 2 * batch_size
    size = min(batch_size, known)
    read, collate = partial(read_items, task, data), getattr(task, "collate", None)
    whole, *parts = (divided(read, size, rng.find_generators(data, collate)) if size > 1
                     else [read(range(size))])
    other = read(range(size, 2 * size)) if known > size else whole
    return _Case(task=task, whole=whole, other=other, parts=parts, size=size)


def _check_model(case: _Case) -> Iterator[str]:
    rng.seed_all(SEED, rng.MODEL)
    model = case.task.model()
    if not isinstance(model, nn.Module):
        yield f"model() returned {type(model).__name__}; return a torch.nn.Module."
    elif not any(p.requires_grad for p in model.parameters()):
        yield "the model has no trainable parameter, so there is nothing to train."
    else:
        try:
            check_state_dict(model)
        except ConfigError as error:
            yield str(error).removeprefix("--task: ")


def _check_loss(case: _Case) -> Iterator[str]:
    with first_batch():
        outcome = case.outcome(case.model(), case.whole)
    total, _ = check_outcome(outcome)
    if not math.isfinite(total.item()):
        yield f"the loss of {case.size} samples is {total.item()}; it must be finite."
    if not _number(outcome.count) > 0:
        yield (f"Outcome.count of {case.size} samples is {_number(outcome.count)}; return the "
               "denominator of the mean: samples, tokens or a sum of weights.")
    if not total.requires_grad:
        yield ("Outcome.total has no graph: compute it from the model's output, without "
               ".detach(), .item() or no_grad().")


def _check_gradients(case: _Case) -> Iterator[str]:
    model = case.model()
    others = list[Tensor]()
    if case.turn:
        others = TurnParameters(optimizer_of(Optim(), model, case.task), case.turn).others
    foreign = list[dict[Tensor, str]]()
    for _ in range(2):
        total, _ = check_outcome(case.outcome(model, batches.copy_of(case.whole)))
        foreign.append({leaf(): text for leaf, text in foreign_leaves(total, model)})
    total.backward()
    if lasting := [text for leaf, text in foreign[1].items() if leaf in foreign[0]]:
        yield FOREIGN.format(listed(lasting))
    trainable = {n: p.grad for n, p in model.named_parameters()
                 if p.requires_grad and all(p is not other for other in others)}
    if missing := [name for name, gradient in trainable.items() if gradient is None]:
        yield (f"no gradient reaches {listed(missing)} (.grad is None): use it in the loss, or "
               "set requires_grad to False.")
    if broken := [n for n, g in trainable.items()
                  if g is not None and not torch.isfinite(g.to_dense()).all()]:
        yield f"the gradient of {listed(broken)} is not finite."


def _check_sums(case: _Case) -> Iterator[str]:
    """Compare sums in eval mode: with dropout or batch statistics they may depend on the split, as
    with buffers that change in eval mode."""
    model = case.model()
    model.eval()
    problems, _ = unequal_sums(lambda batch, key: case.outcome(model, batch, key=key), model,
                               case.whole, *case.parts, tolerance=TOLERANCE)
    yield from (f"{problem}: {SUMS}" for problem in problems)


def _check_step(case: _Case) -> Iterator[str]:
    """Run one training step with a micro-batch and a stand-in."""
    model = case.model()
    optimizer = optimizer_of(Optim(), model, case.task)
    if names := optimizers.untrained(optimizer, model):
        yield (f"no group of parameter_groups() has {listed(names)}, so it isn't trained; add it "
               "to a group, or freeze it (requires_grad_(False)).")
    objective = Objective(model, case.loss(case.task), num_ranks=1, nominal_count=case.size,
                          device=torch.device("cpu"))
    state = TrainState(
        model=model, optimizer=optimizer, schedule=LambdaLR(optimizer, lambda update: 1.0),
        scaler=torch.amp.GradScaler("cpu", enabled=False), progress=TrainProgress(),
        best=BestTracker(), meter=LossMeter(), seed=SEED, num_ranks=1)
    step = Step.plain(state, objective, objective, of=TurnParameters(optimizer, case.turn),
                      after_step=method_of(case.task, "after_step"))
    full = MicroBatch(MicroBatchSpec(1, 0, 0, False, tuple(range(case.size))), case.whole)
    result = step([full, MicroBatch(MicroBatchSpec(1, 0, -1, True, ()), case.whole)])
    assert result is not None, "the step had samples"
    broken = [n for n, p in model.named_parameters() if not torch.isfinite(p).all()]
    if result.skipped or broken:
        yield (f"a training step has a loss of {result.sums.loss}, a gradient norm of "
               f"{result.grad_norm}" + (f", and non-finite {listed(broken)}." if broken else "."))


def _check_state(case: _Case, pristine: Any) -> Iterator[str]:
    """An uninterrupted run and one restarted from the contents of a checkpoint must be equal."""
    straight = case.model()
    unused = values(straight)
    case.outcome(straight, case.whole, key=1)
    saved = {name: tensor.clone() for name, tensor in model_tensors(straight)}
    expected = case.outcome(straight, case.other, key=2)

    for split in splits_of(pristine):
        dataset_of(pristine, split)  # so that both copies of the task have created their data sets
    restarted = case.model(pristine)
    take_shapes(restarted, saved)
    copy_into(dict(model_tensors(restarted)), saved, "the model")
    found = case.outcome(restarted, case.other, key=2, task=pristine)

    used = values(straight)
    changed = {*differing(unused, used)}  # two models may differ from the start, as in ids of hooks
    if hidden := [n for n in differing(used, values(restarted)) if n in changed]:
        yield (f"the training forward changes {listed(hidden)} of the model, which isn't saved in "
               "a checkpoint: make it a buffer (register_buffer with a tensor), or a function of "
               "the batch.")
    if in_task := differing(values(case.task), values(pristine)):
        yield (f"using the task changes its {listed(in_task)}, which isn't saved in a checkpoint: "
               "keep state in buffers of the model, not in the task.")
    total, again = (_number(check_outcome(outcome)[0]) for outcome in (expected, found))
    if not (hidden or in_task or total == again or math.isnan(total)):
        yield (f"after a restart the same batch gives a loss of {again!r} instead of {total!r}: "
               "it depends on something other than parameters and buffers.")


def _number(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
