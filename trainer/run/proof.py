"""Proof at the start that a task can be exact: its sums don't depend on the micro-batches, no state
is outside of checkpoints, and the state comes back from them."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainer import rng
from trainer.checkpoint.buffers import Buffers
from trainer.checkpoint.train_state import (
    CONFIGURED,
    TrainState,
    copy_into,
    fits_json,
    model_tensors,
)
from trainer.distributed import torch_private
from trainer.distributed.comm_timer import CommunicationTimer
from trainer.distributed.ddp import no_marks
from trainer.distributed.replica_check import checksums
from trainer.distributed.serialization import as_bytes
from trainer.errors import CheckpointDamaged, ConfigError, listed
from trainer.optim.named_optimizers import turns_of
from trainer.storage import tensorfile
from trainer.task import Outcome, check_outcome

_OWN_OF_MODULES = frozenset(vars(nn.Module()))
MOST_VALUES, DEPTH = 10_000, 12
"""Maximal number, and depth, of the values of an attribute that are compared."""
_NAMED = (type, types.ModuleType, nn.Module)
"""Values that are known by their type alone."""
_STATES: dict[type, Callable[[Any], Any]] = {
    random.Random: random.Random.getstate, torch.Generator: torch.Generator.get_state,
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    np.random.RandomState: lambda generator: repr(generator.get_state())}


def content(sample: Any) -> bytes:
    """Serialize a nested sample or batch: equal bytes mean equal content."""
    return b"".join(_content(sample, set(), -1))


def _content(value: Any, seen: set[int], depth: int) -> Iterator[bytes]:
    """Each leaf is preceded by its type; `seen` ends cyclic references, `depth` linked lists
    (-1: no limit)."""
    if isinstance(value, Tensor) and value.is_nested:
        value = value.unbind()
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if not value.is_meta:
            yield as_bytes(dense.cpu()).numpy().tobytes()
        return
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        yield f"{type(value).__name__} {value!r}".encode()
        return
    if hasattr(type(value), "__array_interface__"):  # numpy's, PIL's
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}".encode()
        if not array.dtype.hasobject:
            yield array.tobytes()
            return
        value = array.ravel().tolist()
    yield type(value).__qualname__.encode()
    if not depth:
        return
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    elif isinstance(value, Mapping):
        value = [entry for pair in value.items() for entry in pair]
    elif isinstance(value, tuple(_STATES)):
        value = [state(value) for kind, state in _STATES.items() if isinstance(value, kind)]
    elif not isinstance(value, tuple | list | deque):  # a dataclass, or an object of the task
        if id(value) in seen or isinstance(value, _NAMED):
            return
        seen.add(id(value))
        slots = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        named = {f.name: getattr(value, f.name) for f in slots} or getattr(value, "__dict__", {})
        value = [entry for pair in named.items() for entry in pair]
    yield str(len(value)).encode()
    for entry in value:
        yield from _content(entry, seen, depth - 1)


def attributes(model: nn.Module) -> dict[str, str]:
    """Name → digest of the content of each attribute of the modules that is no part of a model."""
    found = {f"{owner}.{name}".lstrip("."): value for owner, module in model.named_modules()
             for name, value in vars(module).items()
             if name not in _OWN_OF_MODULES and not isinstance(value, CommunicationTimer)}
    shared = {id(value): value for value in found.values()}  # such as the configuration of layers
    digests = {key: xxhash.xxh3_128(b"".join(islice(_content(value, set(), DEPTH), MOST_VALUES)))
               for key, value in shared.items()}
    return {name: digests[id(value)].hexdigest() for name, value in found.items()}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of entries that are missing in one of the two, or not equal."""
    return [name for name in {**other, **one} if name not in one or name not in other
            or content(one[name]) != content(other[name])]


class _SameDraws(torch_private.TorchDispatchMode):
    """Context in which torch draws one number for all elements of a tensor, the same in each call.
    Random are still: draws from given probabilities, permutations, and those of a generator."""

    _left = MOST_VALUES  # for loops that draw until a number fits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        forms: list[Any] = [arg for arg in args if isinstance(arg, Tensor | list)]
        if (torch.Tag.nondeterministic_seeded in function.tags and len(forms) == 1 and self._left
                and (isinstance(forms[0], list) or out is forms[0] or "_like" in str(function))
                and kwargs.get("generator") is None):
            self._left -= 1
            few = [[1] if isinstance(arg, list) else arg.new_empty(1) if arg is forms[0] else arg
                   for arg in args]
            with rng.preserved():
                rng.seed_all(0)
                out.fill_(function(*few, **kwargs).reshape(()))
        return out


def unequal_sums(
    compute: Callable[[Any, int], Outcome], model: nn.Module, *parts: Any, tolerance: float
) -> tuple[list[str], str]:
    """What differs between the sums and gradients of a batch and those of its halves, one sentence
    each; and why that can't be known, if it can't. The model's gradients are lost. `parts`: the
    batch, its halves, and the batch in reverse order, whose gradients differ by rounding only; or
    the batch alone. `tolerance` is relative to max(1, |sum|)."""
    if len(parts) == 1:
        return [], "of a batch can't be compared with those of its halves"
    buffers = Buffers(model)
    found = _unequal_sums(compute, model, buffers, *parts, tolerance=tolerance)
    if found is None:
        with _SameDraws():
            found = _unequal_sums(compute, model, buffers, *parts, tolerance=tolerance)
    if found is None:
        return [], "is random in eval mode"
    if found and any(isinstance(module, torch_private.BatchNorm) and module.running_mean is None
                     for module in model.modules()):
        return [], "depends on batch statistics in eval mode"
    return [] if found and buffers.moved() else found, ""


def _unequal_sums(
    compute: Callable[[Any, int], Outcome], model: nn.Module, buffers: Buffers, whole: Any,
    *parts: Any, tolerance: float,
) -> list[str] | None:  # fmt: skip
    """See `unequal_sums`; None if the loss is random."""

    def computed(parts: Sequence[Any], key: int = 1) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The added sums of some batches, and their added gradients where these are dense."""
        model.zero_grad(set_to_none=True)
        added = dict[str, float]()
        for part in parts:
            with buffers.preserved():
                outcome = compute(part, key)
            added = {name: value + added.get(name, 0.0) for name, value in sums(outcome).items()}
            if (total := check_outcome(outcome)[0]).requires_grad:
                with no_marks(model.parameters()):
                    total.backward()
        slopes = {name: parameter.grad for name, parameter in model.named_parameters()
                  if parameter.grad is not None and parameter.grad.layout == torch.strided}
        model.zero_grad(set_to_none=True)
        return added, slopes

    *halves, turned = parts
    one, slopes = computed([whole])
    if not math.isfinite(one["Outcome.total"]):
        return []
    added, added_slopes = computed(halves)
    problems = [f"{name} of a batch is {value:.6g}, but {added.get(name, math.nan):.6g} for the "
                "same samples in two batches" for name, value in one.items()
                if not abs(value - added.get(name, math.nan)) <= tolerance * max(1.0, abs(value))]
    names = [] if problems else _unequal_gradients(slopes, added_slopes, {}, tolerance)
    if names:
        _, rounded = computed([turned])
        names = _unequal_gradients(slopes, added_slopes, rounded, tolerance)
    if names:
        problems = [f"the gradient of {listed(names)} for a batch is not the sum of those for the "
                    "same samples in two batches"]
    if problems:
        again, slopes_again = computed([whole], key=2)
        if again != one or differing(slopes, slopes_again):
            return None
    return problems


def _unequal_gradients(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], rounded: Mapping[str, Tensor],
    tolerance: float,
) -> list[str]:  # fmt: skip
    """Names of gradients that differ by more than the tolerances, and than `rounded` does: sums
    over many tokens in bf16 have large errors."""
    norms = {name: float(slope.norm()) for name, slope in one.items()}
    least = GRADIENT_TOLERANCE * 1e-3 * math.hypot(*norms.values())
    share = max(GRADIENT_TOLERANCE, tolerance)
    return [name for name, norm in norms.items() if name in other
            and float((one[name] - other[name]).norm()) > least + share * norm + ROUNDINGS * float(
                (one[name] - rounded.get(name, one[name])).norm())]


def sums(outcome: Outcome) -> dict[str, float]:
    """The sums of an outcome by name."""
    total, metrics = check_outcome(outcome)
    found: dict[str, Any] = {"Outcome.total": total, "Outcome.count": outcome.count}
    for name, (value, count) in metrics.items():
        found |= {f"the sum of {name!r}": value, f"the count of {name!r}": count}
    return {name: float(value.detach() if isinstance(value, Tensor) else value)
            for name, value in found.items()}


def foreign_leaves(total: Tensor, model: nn.Module) -> list[tuple[Any, str]]:
    """Trainable tensors on which a loss depends, and which are no parameters of the model: weak
    reference and description. One that another computation does not use was made by the loss."""
    own, queue, found = set(model.parameters()), [total.grad_fn], list[tuple[Any, str]]()
    seen = set(queue)
    for node in queue:
        leaf = getattr(node, "variable", None)  # of the node that accumulates a leaf's gradient
        if isinstance(leaf, Tensor) and leaf not in own:
            found.append((weakref.ref(leaf), f"{type(leaf).__name__} of shape {tuple(leaf.shape)}"))
        following = {n for n, _ in getattr(node, "next_functions", ()) if n is not None} - seen
        seen |= following
        queue += following
    return found


FOREIGN = ("the loss depends on trainable tensors that are no parameters of the model ({}), so "
           "they would be neither trained nor saved: make them parameters of the model, or compute "
           "with them under torch.no_grad() or after requires_grad_(False).")
SUMS = ("return the sum over the samples, and their number (or tokens, or weights) as the count, "
        "not a mean. (--start-checks off trains without this check, for a loss that compares or "
        "balances the samples of a batch.)")
GRADIENT_TOLERANCE = 1e-2
"""Tolerance for rounding between the gradients for a batch and for its halves, relative to their
norms; a thousandth of it relative to the norm of all gradients."""
ROUNDINGS = 4
"""Tolerance relative to the rounding by another order of the samples."""


def check_state_dict(model: nn.Module) -> None:
    """Raise ConfigError if a checkpoint can't hold or restore the model's state."""
    parts = dict(chain(model.named_parameters(), model.named_buffers()))
    for name, value in parts.items():
        if is_lazy(value) or value.is_meta:
            raise ConfigError(
                f"--task: the model's {name} has no values yet (a lazy module, or the meta device);"
                " model() must initialise it, for example by a call with a batch of zeros.")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"--task: the model's state_dict has {name!r}, a {type(value).__name__}, but a "
                "checkpoint holds tensors only; make it a buffer (register_buffer with a tensor) "
                "instead of an extra state.")
        try:
            next(tensorfile.serialize({name: value}))
        except TypeError as error:
            raise ConfigError(f"--task: the model's {error}, so a checkpoint cannot hold it; use "
                              "another dtype (two real parts for a complex one).") from None
        if value.layout != torch.strided:
            raise ConfigError(f"--task: the model's {name} is sparse, and a checkpoint cannot hold "
                              "it; make it dense, or register its indices and values.")
    if lost := _not_restored(model, parts):
        raise ConfigError(
            f"--task: {listed(lost)} of the model doesn't come back from its state_dict, so a "
            "checkpoint could not restore it. A state_dict, its hooks and extra states may rename "
            "tensors and omit frozen ones, but must not omit, cut or convert others: make it a "
            "plain parameter or buffer, or freeze it (requires_grad_(False)).")


def _not_restored(model: nn.Module, parts: Mapping[str, Tensor]) -> list[str]:
    """Names of parts, trainable or in the state_dict, that differ after they were saved,
    overwritten and loaded."""
    entries = dict(model_tensors(model))
    memory = {tensor.untyped_storage().data_ptr() for tensor in entries.values()}
    needed = {name: part.detach() for name, part in parts.items() if part.numel() and (
        part.requires_grad or name in entries or part.untyped_storage().data_ptr() in memory)}
    if not needed:
        return []
    saved = {name: tensor.clone() for name, tensor in entries.items()}
    before = checksums(needed.values())
    for part in needed.values():
        if part.is_floating_point():
            part.fill_(math.nan)
        else:
            part.bitwise_not_()
    copy_into(dict(model_tensors(model)), saved, "model")
    differs = (checksums(needed.values()) != before).tolist()
    return [name for name, differs_here in zip(needed, differs, strict=True) if differs_here]


def watch_optimizer(state: TrainState) -> None:
    """Prove the first two updates of an optimizer class of the user by a step hook. Of several
    optimizers that take turns, each has its turns."""
    left, proving = 2 * len(turns_of(state.optimizer)), False

    def prove(*_: Any) -> None:
        nonlocal left, proving
        if proving:
            return
        proving = True
        check_optimizer_state(state.optimizer, state.names())
        prove_update(state)
        left, proving = left - 1, False
        if not left:
            hook.remove()

    hook = state.optimizer.register_step_post_hook(prove)


def prove_update(state: TrainState) -> None:
    """Raise ConfigError if the optimizer's state, or the next update, is not the same after the
    state is saved and loaded in memory. All tensors stay in use, with their values."""
    optimizer, names = state.optimizer, state.names()
    gradients = {p: p.grad for g in optimizer.param_groups for p in g["params"]}
    entries = {parameter: {key: value if isinstance(value, Tensor) else copy.deepcopy(value)
                           for key, value in entry.items()}
               for parameter, entry in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    live = [*gradients, *(v for e in entries.values() for v in e.values() if isinstance(v, Tensor))]
    copies = [tensor.detach().clone() for tensor in live]
    tensors = {n: t.detach().clone() for n, t in state.optimizer_tensors().items()}
    facts, lost = json.loads(json.dumps(state.optimizer_facts())), list[str]()

    def update() -> list[int]:
        rng.seed_all(0)
        for parameter, gradient in gradients.items():
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        after = checksums(gradients).tolist()
        with torch.no_grad():
            for tensor, values in zip(live, copies, strict=True):
                tensor.copy_(values)
        for group, old in zip(optimizer.param_groups, groups, strict=True):
            group.update(old)
        return after

    with rng.preserved():
        first = update()
        try:
            state.load_optimizer(tensors, facts)
        except (CheckpointDamaged, RuntimeError) as error:
            lost = [str(error)]
        lost += [f"{names[p]}: {key}" for p, entry in entries.items() for key, value in
                 entry.items() if content(value) != content(optimizer.state[p].get(key))]
        lost += [key for old, new in zip(groups, optimizer.param_groups, strict=True)
                 for key in old if key != "params" and content(old[key]) != content(new[key])]
        second = first if lost else update()
    optimizer.state.clear()
    optimizer.state.update(entries)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    if lost:
        raise ConfigError(f"--optim.name {type(optimizer).__name__}: its state would not be the "
                          f"same after a restart ({listed(lost)}); keep tensors, numbers, strings "
                          "and lists of them in self.state[parameter] and in the groups.")
    if first != second and torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            f"--optim.name {type(optimizer).__name__}: its next update would not be the same after "
            "a restart, so it depends on an attribute; keep its state in self.state[parameter] and "
            "in the groups (an inner optimizer can share it: self.inner.state = self.state).")


def check_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raise ConfigError if a checkpoint can't hold the optimizer's state."""

    def refuse(what: str) -> None:
        raise ConfigError(f"--optim.name {type(optimizer).__name__}: {what}, which a checkpoint "
                          "cannot hold; keep single tensors in self.state[parameter], and numbers, "
                          "strings and lists of them there or in the groups.")

    for owner, entries in optimizer.state.items():
        if owner not in names:
            refuse(f"it has a state under {str(owner)[:40]!r}, which is not a parameter of the "
                   "model")
        for key, value in entries.items():
            if not isinstance(value, Tensor) and not fits_json(value):
                refuse(f"its state has {key!r}, a {type(value).__name__}, for {names[owner]}")
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names", *CONFIGURED) and not (
                    fits_json(value) or callable(value)):
                refuse(f"its groups have {key!r}, a {type(value).__name__}")
