"""Trial of the first samples: what differs between two computations of them can't be exact."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.data import batch as batches
from trainer.data.map_dataset import KeyedSamples, MicroBatch
from trainer.data.sample_errors import SampleError, summarize_exception
from trainer.distributed.ddp import Objective
from trainer.distributed.rank_invariant_reduction import RankInvariantReduction
from trainer.distributed.replica_check import checksums
from trainer.errors import ConfigError, from_rank, listed
from trainer.run import proof
from trainer.run.model_modes import eval_mode
from trainer.run.prepare import Setup
from trainer.run.proof import content
from trainer.run.run import BuiltRun
from trainer.step import NOTHING, ForwardBackward
from trainer.task import Outcome, check_outcome

NO_CHECKS = "(--start-checks off trains without this check.)"
FEW = 8
"""Most samples of the trial: together with its halves it costs as much as 16 samples of a step."""
HIDDEN = (
    "{} gives another {}, though parameters and saved buffers are the same: it depends on state "
    "that no checkpoint holds (an attribute, a global variable, a generator, the clock), so a "
    "restart gives other bits. Keep state in buffers (register_buffer with a tensor), and draw "
    "from torch, numpy.random or random directly.{}")
UNCHECKED = "so it isn't checked that it is a sum"
OTHER_LOSS = "so another number of ranks gives another loss"
MOVED = ("the model's forward begins to change the parameters {} after the first updates, and a "
         "rank could not save inside a step: change them in after_step(model, step), or make them "
         "buffers (register_buffer).")


@dataclass(frozen=True)
class Observation:
    """The results of a forward and backward on this rank alone, and attributes of the modules."""

    results: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    foreign: list[tuple[Any, str]] = field(default_factory=list)
    """Trainable tensors that are no parameters of the model (`proof.foreign_leaves`)."""

    gradients: dict[str, list[Any]] = field(default_factory=dict)
    """Checksum of each addition to the gradient of a parameter, before the ranks reduce it."""

    @classmethod
    @contextlib.contextmanager
    def of(cls, compute: ForwardBackward, *, deep: bool = True) -> Iterator[Observation]:
        """Observe the computation of a micro-batch inside the context; `deep`: more than its
        gradients."""
        seen, model = cls(), compute.model
        names: dict[Tensor, str] = {p: n for n, p in model.named_parameters()}
        hooks = [p.register_hook(partial(seen._add_gradient, names[p])) for p in compute.parameters]
        try:
            with compute.objective.watched(
                    partial(seen._add_outcome, compute.objective) if deep else None):
                yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def _add_outcome(self, objective: Objective, outcome: Outcome) -> None:
        self.results.update(proof.sums(outcome))
        self.foreign.extend(proof.foreign_leaves(check_outcome(outcome)[0], objective.model))
        self.attributes.update(_numbers(objective.loss) | proof.attributes(objective.model))

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        self.gradients.setdefault(name, []).append(
            checksums([gradient]) if gradient.layout == torch.strided else str(gradient.shape))

    def differences(self, other: Observation) -> list[str]:
        """The results that differ, in words."""
        found = [f"{name} ({self.results.get(name)!r}, then {other.results.get(name)!r})"
                 for name in proof.differing(self.results, other.results)]
        return found + [f"gradient of {name}"
                        for name in proof.differing(self.gradients, other.gradients)]


def _numbers(loss: Any) -> dict[str, Any]:
    """The numbers among the attributes of a loss's task, and its global variables."""
    function = getattr(loss, "func", loss)
    known, used = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
    found = {name: known.get(name) for name in (used.co_names if used is not None else ())}
    found |= getattr(getattr(function, "__self__", None), "__dict__", {})
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


class Trial:
    """The first samples of a run, of the micro-batch `micro`, which are computed again and again.
    """

    def __init__(self, built: BuiltRun, compute: ForwardBackward, micro: MicroBatch) -> None:
        self._built, self._compute, self._micro = built, compute, micro
        self._world, self._log = built.context.world, built.context.log
        self._checks = built.context.config.start_checks == "on"
        self._sets = () if compute.turn else tuple(built.validations.values())
        self._autocast: Any = contextlib.nullcontext
        self._few: Any = None
        self._evaluated: dict[str, Any] | None = None

    def prove_sums(self) -> None:
        """Collective. Refuse a loss that differs between the first samples and their two halves, in
        eval mode (dropout and batch statistics may depend on them, as may buffers that change in
        eval mode)."""
        built, world, model = self._built, self._world, self._compute.model
        parts = world.fail_together(partial(
            _parts, built.setup, self._micro, built.context.config.seed)) if self._checks else []
        parts = parts[:min(world.gather_json(len(parts)))]  # the loss may communicate
        if not parts:
            return
        self._few = parts[0]
        eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
        unchecked, cause, mine = "", "", list[str]()
        with self._in_evaluation():
            try:
                with contextlib.suppress(Exception):
                    self._evaluated = self._evaluate()
                if self._evaluated is None:  # a part of the model in bf16 may need it
                    self._autocast = self._compute.autocast
                    # The loss of a turn may need gradients, as a penalty of them does.
                    with NOTHING if self._sets else contextlib.suppress(Exception):
                        self._evaluated = self._evaluate()
                mine, unchecked = proof.unequal_sums(self._outcome, model, *parts,
                                                     tolerance=max(1e-3, 8 * eps))
            except Exception as error:
                if self._evaluated is None:
                    if self._sets:
                        self._refuse_gradients(error)
                        raise
                    self._few = None
                unchecked = "can't be computed in eval mode"
                cause = f" ({summarize_exception(error)})"
        if unchecked:
            self._log.warn_once(
                f"the loss {unchecked}, {UNCHECKED}{cause}")
        if found := [problem for rank in world.gather_json(mine) for problem in rank]:
            raise from_rank(0, ConfigError(f"--task: {found[0]}: {proof.SUMS}"))

    @contextlib.contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        # cuDNN has no backward of an RNN in eval mode.
        with eval_mode(self._compute.model), _eager(), torch.backends.cudnn.flags(enabled=False):
            yield

    def _outcome(self, batch: Any, key: int) -> Outcome:
        objective, model = self._compute.objective, self._compute.model
        rng.seed_all(self._built.context.config.seed, rng.MICRO, key)
        rng.key(rng.find_generators(*model.modules(), objective.loss), key)
        with self._autocast():
            outcome = objective.loss(model, batches.copy_of(batch))
        for evaluator in self._sets:
            if evaluator.states.metrics:
                evaluator.states.arguments(outcome.predictions)
        return outcome

    def _evaluate(self) -> dict[str, Any]:
        with Buffers(self._compute.model).preserved(), torch.no_grad():
            return proof.sums(self._outcome(self._few, 1))

    def _refuse_gradients(self, error: Exception) -> None:
        """Refuse a loss that has failed in evaluation, but not with gradients."""
        try:
            self._outcome(self._few, 1)
        except Exception:
            return  # for another reason
        raise ConfigError(
            "--task: the loss can't be computed without gradients, as a validation does "
            f"({summarize_exception(error)}): compute what needs them under torch.enable_grad(), "
            "or only if model.training.") from error

    def compare(self, one: Observation, other: Observation) -> None:
        """Collective. Refuse results of a second forward and backward that differ from the first,
        and then of an evaluation; warn of attributes that differ."""
        attributes = listed(proof.differing(one.attributes, other.attributes))
        why = f" The forward changes {attributes}." * bool(attributes)
        if not torch.are_deterministic_algorithms_enabled():
            return
        self._refuse_hidden(one, other, "a second computation of the first micro-batch", why)
        before = now = Observation(self._evaluated or {})
        if self._evaluated is not None:
            with self._in_evaluation():
                now = Observation(self._evaluate())
        self._refuse_hidden(before, now, "after training forwards, an evaluation of the first "
                            "samples", why)
        if attributes:
            self._log.warn_once(
                f"the forward changes {attributes}, which no checkpoint holds; a restart gives "
                "other bits if any result depends on it. Make it a buffer (register_buffer with a "
                "tensor, changed in place)")

    def _refuse_hidden(
        self, one: Observation, other: Observation, what: str, why: str = ""
    ) -> None:
        """Collective. Refuse results that differ."""
        differences = one.differences(other)
        self._refuse(HIDDEN.format(what, differences[0], why) if differences else "")

    def _refuse(self, problem: str) -> None:
        """Collective. Refuse a problem of any rank; without checks, warn of it."""
        found = next(filter(None, self._world.gather_json(problem)), "")
        if found and self._checks:
            raise from_rank(0, ConfigError(f"--task: {found} {NO_CHECKS}"))
        if found:
            self._log.warn_once(found)

    def repeat(self, step: int) -> None:
        """Collective, at the beginning of a step. Compute the first samples with weights that
        updates have changed, again with the buffers that this leaves, and again with those of the
        boundary: refuse another result in the end."""
        if not self._checks or not torch.are_deterministic_algorithms_enabled():
            return
        compute, parameters = self._compute, dict(self._compute.model.named_parameters())
        boundary = self._built.trainable.boundary
        buffers, moves = boundary.buffers, not boundary.only_buffers_change
        copies = {p: p.detach().clone() for p in parameters.values() if moves}
        micro = replace(self._micro, spec=replace(self._micro.spec, step=step, last=False),
                        batch=self._micro.batch if self._few is None else self._few)
        before, seen = checksums(parameters.values()), list[Observation]()
        for put_back in (None, buffers.put_back_saved, buffers.put_back):
            with _eager(), Observation.of(compute) as observation:
                compute(replace(micro, batch=batches.copy_of(micro.batch)), rehearsal=True)
            seen.append(observation)
            buffers.restore_storage()
            compute.objective.accumulator.take()
            self._built.state.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                for parameter, values in copies.items():
                    parameter.copy_(values)
            if put_back is not None:
                put_back()
        moved = [*itertools.compress(parameters, checksums(parameters.values()) != before)]
        self._refuse(MOVED.format(listed(moved)) if moved else "")
        self._refuse_hidden(seen[0], seen[2],
                            "after two updates, a second computation of the first samples")
        if seen[0].differences(seen[1]) and not isinstance(
                compute.reduction, RankInvariantReduction):
            self._log.warn_once(
                f"the training loss depends on buffers that the forward changes, {OTHER_LOSS} (not "
                "with --parallel.reduction canonical)")


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Context without compiled code: batches of other sizes would change what is compiled."""
    return (torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules
            else contextlib.nullcontext())


def _parts(setup: Setup, micro: MicroBatch, seed: int) -> list[Any]:
    """A few of the first samples of a micro-batch, their halves, and all in reverse order; all of
    them alone if they can't be divided, none if there is only one. If `collate` mixes the samples,
    draws for each of them or needs more, the batch is cut."""
    indices, data = micro.spec.indices or micro.spec.stand_in, setup.data["train"]
    device, count = next(setup.model.parameters()).device, min(len(indices), FEW)
    if count < 2:
        return []
    every = [*range(count)]
    pieces = [every, every[: count // 2], every[count // 2 :], every[::-1]]
    if isinstance(data, IterableDataset):
        return _cuts(micro.batch, micro.samples, pieces) or [micro.batch]
    reader = KeyedSamples(data, seed=seed, collate=setup.collate, same_draws=True)
    generators = rng.find_generators(data, setup.collate)
    parts, drawn = list[Any](), set[bytes]()
    with contextlib.suppress(SampleError):  # `collate` may need more samples than a half has
        for piece in (every, *pieces):
            spec = replace(micro.spec, indices=tuple(indices[i] for i in piece))
            parts.append(reader[spec].batch)
            drawn.add(content([rng.digest(rng.snapshot()), generators]))
    if len(parts) < 2:  # a bad sample, which was replaced
        return [micro.batch]
    first, *parts = parts
    cuts = _cuts(first, count, pieces)
    mixed = cuts and content([*batches.tensors(cuts[-1])]) != content([*batches.tensors(parts[-1])])
    if content(first) != content(parts[0]):
        parts = parts[:1]
    elif mixed or len(drawn) > 1 or len(parts) < len(pieces):  # not one draw for all, but masks
        parts = cuts or parts[:1]
    return [batches.to_device(batch, device) for batch in parts]


def _cuts(batch: Any, samples: int, pieces: list[list[int]]) -> list[Any]:
    """Pieces of a batch; none if it can't be cut."""
    try:
        return [batches.rows(batch, samples, piece) for piece in pieces]
    except ValueError:
        return []
