"""Optimizers: frozen parameters, parameter groups, construction, gradient clipping."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.config.schema import Clip, Optim
from trainer.errors import ConfigError, listed
from trainer.optim.adamw import AdamW
from trainer.task import load_object

WITHOUT_DECAY = (torch.optim.Rprop, torch.optim.SparseAdam)
"""Optimizers of torch that have no weight decay."""
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module, weight_decay: float, rates: Sequence[str] = (), lr: float = 0.0
) -> list[dict[str, Any]]:
    """Split the trainable parameters into two groups for each learning rate, with and without
    weight decay.

    Matrices and kernels decay. Biases, parameters of normalisation layers, and parameters of fewer
    than 2 dimensions do not. Frozen parameters are in no group.

    Args:
        rates: PATTERN=FACTOR of `lr`; the first pattern that matches a name counts.

    Raises:
        ConfigError: a pattern matches no trainable parameter.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    in_norms = {p for m in model.modules() if isinstance(m, NORMS) for p in m.parameters()}
    factors = dict.fromkeys(trainable, 1.0)
    for text in reversed(rates):
        pattern, _, value = text.rpartition("=")
        for name in matching(trainable, pattern, flag="optim.rates"):
            factors[name] = float(value)
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for factor in sorted(set(factors.values()), key=lambda f: (f != 1, f)):
        rate = {"lr": lr * factor} if rates else {}
        groups[factor, True] = {"params": [], "weight_decay": weight_decay, **rate}
        groups[factor, False] = {"params": [], "weight_decay": 0.0, **rate}
    for name, p in trainable.items():
        decays = p.dim() >= 2 and p not in in_norms and name.rpartition(".")[2] != "bias"
        groups[factors[name], decays]["params"].append((name, p))
    return [g for g in groups.values() if g["params"]]


def matching(names: Iterable[str], pattern: str, *, flag: str) -> list[str]:
    """Names that match a file-name pattern (`*`, `?`, `[…]`).

    Raises:
        ConfigError: no name matches.
    """
    known = list(names)
    found = fnmatch.filter(known, pattern)
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)
        raise ConfigError(f"--{flag} {pattern}: matches no trainable parameter; similar names "
                          f"are {', '.join(near)}.")
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze parameters, and the statistics of batch norms whose parameters are all frozen.

    Such batch norms stay in eval mode. `!PATTERN` unfreezes; the last matching pattern counts.

    Returns:
        names of the frozen parameters.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        trainable = pattern.startswith("!")
        for name in matching(parameters, pattern.removeprefix("!"), flag="freeze"):
            parameters[name].requires_grad_(trainable)
    for path, module in model.named_modules():
        if patterns and isinstance(module, _NormBase) and (
            not any(p.requires_grad for p in module.parameters()) if module.affine
            else _is_frozen(patterns, f"{path}.running_mean")
        ):
            module.eval()
            module.train = MethodType(_stay_in_eval, module)  # type: ignore[method-assign]
    return [n for n, p in parameters.items() if not p.requires_grad]


def _is_frozen(patterns: Sequence[str], name: str) -> bool:
    """Whether the last pattern that matches the name freezes it."""
    matches = [p for p in patterns if fnmatch.fnmatchcase(name, p.removeprefix("!"))]
    return bool(matches) and not matches[-1].startswith("!")


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `train` of a frozen batch norm."""
    return module


def make_optimizer(
    config: Optim, model: nn.Module,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """Build the configured optimizer for the model's trainable parameters.

    Args:
        groups: `parameter_groups` of the task; None if the task does not define it.

    Raises:
        ConfigError: no parameter is trainable, or the class cannot be imported or called.
    """
    if groups is not None and config.rates:
        raise ConfigError(f"--optim.rates {' '.join(config.rates)}: the task defines "
                          "parameter_groups(); set the rates (\"lr\") there.")
    made = groups(model) if groups is not None else parameter_groups(
        model, config.weight_decay, config.rates, config.lr)
    if groups is not None:
        made = _checked(made, model)
    if groups is not None and not made:
        raise ConfigError("--task: parameter_groups(model) returned no parameter.")
    if not any(g["params"] for g in made):
        frozen = any(not p.requires_grad for p in model.parameters())
        raise ConfigError("--freeze, --task: all parameters are frozen." if frozen else
                          "--task: the model has no trainable parameter.")
    optimizer = _make(config, model, made)
    if groups is not None:
        _refuse_misspelt(optimizer)
    return optimizer


def _make(
    config: Optim, model: nn.Module, made: list[dict[str, Any]]
) -> torch.optim.Optimizer:  # fmt: skip
    whole = all(_is_whole(p) for p in model.parameters() if p.requires_grad)
    if config.name == "adamw":
        devices = {p.device.type for p in model.parameters()}
        return (AdamW if whole and devices <= {"cpu", "cuda", "mps"} else torch.optim.AdamW)(
            made, lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay,
        )  # fmt: skip
    if config.name == "sgd":
        return torch.optim.SGD(
            made, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov == "on",
            weight_decay=config.weight_decay, fused=True if whole else None,
        )  # fmt: skip
    cls = load_object(config.name, flag="--optim.name")
    decay = {"weight_decay": config.weight_decay}
    if cls in WITHOUT_DECAY:
        if config.weight_decay and config.weight_decay != Optim().weight_decay:
            raise ConfigError(f"--optim.weight-decay {config.weight_decay}: {config.name} has no "
                              "weight decay; remove the flag.")
        made, decay = [{k: v for k, v in g.items() if k != "weight_decay"} for g in made], {}
    step = inspect.signature(cls.step) if isinstance(cls, type) and hasattr(cls, "step") else None
    needed = [p for p in list(step.parameters.values())[1:] if p.default is p.empty and
              p.kind is p.POSITIONAL_OR_KEYWORD] if step is not None else []
    if needed:
        raise ConfigError(f"--optim.name {config.name}: its step() requires {needed[0].name}, to "
                          "compute the loss several times per update; the trainer computes it "
                          "once. Use an optimizer that needs no such argument, such as adamw.")
    try:
        optimizer = cls(made, lr=config.lr, **decay)
    except (TypeError, ValueError) as error:
        why = f"--optim.name {config.name}: calling it with parameter groups, lr and weight_decay "
        if "only supports 2D parameters" in str(error):
            raise ConfigError(f"{why}raised {error}. Write an optimizer class that uses it for the "
                              "matrices and AdamW for the rest: "
                              "docs/schedules-and-optimizers.md has an example.") from error
        raise ConfigError(f"{why}raised {error}. (The groups are those of the task's "
                          "parameter_groups(), if it defines it.)") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"--optim.name {config.name}: it is not a torch.optim.Optimizer, so its "
                          "state could not be saved; derive it from that class.")
    return optimizer


def _refuse_misspelt(optimizer: torch.optim.Optimizer) -> None:
    """Refuse misspelt keys of parameter groups, which torch accepts and ignores."""
    for key in {key: None for group in optimizer.param_groups for key in group}:
        near = difflib.get_close_matches(key, optimizer.defaults, n=1, cutoff=0.85)
        if near and key not in optimizer.defaults:
            raise ConfigError(f"--task: parameter_groups(model) has {key!r}, which "
                              f"{type(optimizer).__name__} does not use; did you mean "
                              f"{near[0]!r}?")


def untrained(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of the parameters that are not frozen and in no group of the optimizer."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in held]


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's memory has no gaps. A slice (`weight[:, :1]`) has gaps.

    A fused kernel on CPU walks the memory from end to end and would update the gaps too.
    """
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _checked(made: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Check parameter groups of a task, and drop empty ones.

    Raises:
        ConfigError: an entry is not a group, or holds anything other than the model's parameters.
    """
    what = "--task: parameter_groups(model)"
    if not isinstance(made, list | tuple) or not all(
            isinstance(g, Mapping) and "params" in g for g in made):
        raise ConfigError(f"{what} must return a list of dicts, each with params.")
    own, seen = set(model.parameters()), set[Tensor]()
    kept = []
    for group in made:
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        for key in ("lr", "weight_decay"):
            if isinstance(group.get(key, 0.0), str):
                raise ConfigError(f"{what} has {key!r}: {group[key]!r}, a string; write a number.")
        for parameter in (p[1] if isinstance(p, tuple) else p for p in params):
            if not isinstance(parameter, Tensor):
                raise ConfigError(f"{what} has {parameter!r} in params; it must be a parameter of "
                                  "the model.")
            if parameter not in own:
                raise ConfigError(f"{what} has a tensor of shape {tuple(parameter.shape)} that is "
                                  "not a parameter of the model, so no checkpoint would hold it.")
            if parameter in seen:
                raise ConfigError(f"{what} has a parameter of shape {tuple(parameter.shape)} "
                                  "twice; each parameter belongs to one group.")
            seen.add(parameter)
        if params:
            kept.append({**group, "params": params})
    return kept


def sparse_gradient_problem(
    optimizer: torch.optim.Optimizer, clipping: Clip, sparse: Mapping[Tensor, str],
    dense: Mapping[Tensor, str],
) -> str:  # fmt: skip
    """Explain why the optimizer or the clipping cannot use the gradients; "" if no reason is known.

    Optimizers of the user are assumed to support sparse gradients.

    Args:
        sparse: parameters with a sparse gradient → their names.
        dense: parameters with a dense gradient → their names.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        return (f"--optim.name torch.optim:SparseAdam: it supports only sparse gradients, and "
                f"those of {listed(dense.values())} are dense; use adamw, with sparse=False in "
                "embeddings" if dense else "")
    if not sparse:
        return ""
    of = f"the gradient of {listed(sparse.values())} is sparse"
    remedy = "use sparse=False in embeddings"
    if clipping.value > 0:
        return (f"--clip.value {clipping.value}: {of}, and torch cannot clip it by value; use "
                "--clip.norm")
    if isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad):
        groups = [g for g in optimizer.param_groups if not sparse.keys().isdisjoint(g["params"])]
        if any(g.get("fused") for g in groups):
            return (f"--optim.name sgd: {of}, and torch's fused {name} does not support it; "
                    f"{remedy}, or --optim.name torch.optim:{name} with --optim.weight-decay 0")
        if any(g["weight_decay"] for g in groups):
            return (f"--optim.weight-decay: {of}, and {name} supports no weight decay with it; use "
                    f"--optim.weight-decay 0, or {remedy[4:]}")
        return ""
    if type(optimizer).__module__.startswith(("torch.optim", "trainer.")):
        chosen = "adamw" if isinstance(optimizer, AdamW) else f"torch.optim:{name}"
        return (f"--optim.name {chosen}: {of}, and {name} does not support it; {remedy}, or "
                "--optim.name torch.optim:Adagrad with --optim.weight-decay 0")
    return ""



def zero_grad(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """`optimizer.zero_grad(set_to_none=True)` without torch's profiler record.

    The record takes longer than the rest. An optimizer with another `zero_grad` keeps it.
    """
    own = getattr(optimizer.zero_grad, "__func__", None)
    if own is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for parameter in parameters:
        parameter.grad = None


def clip(parameters: list[Tensor], config: Clip) -> Tensor:
    """Clip the gradients in place: by value if `config.value` is set, otherwise by global norm.

    The result has the bits of `torch.nn.utils.clip_grad_norm_` if gradients are finite and of one
    dtype.

    Returns:
        global L2 norm before clipping, a scalar tensor. If it is not finite, gradients are not
        clipped by norm; the caller must check it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients)
    if config.value > 0:
        torch.nn.utils.clip_grad_value_(parameters, config.value)
    elif config.norm > 0:
        if norm.is_cpu:  # reading it is free, and far below the limit nothing has to be multiplied
            value = float(norm)
            if not math.isfinite(value) or value + 1e-6 < 0.999 * config.norm:
                return norm
        # A norm that is not finite counts as 0, which changes no gradient: otherwise one NaN would
        # spread to all gradients and hide its origin.
        safe = norm.nan_to_num(0.0, 0.0, 0.0)
        torch._foreach_mul_(gradients, (config.norm / (safe + 1e-6)).clamp(max=1.0))
    return norm


def total_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm of all gradients as one vector, a scalar tensor.

    Like `torch.nn.utils.get_total_norm`, but without its sorting by device and dtype.
    """
    if not gradients:
        return torch.tensor(0.0)
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
