"""Optimizers: frozen parameters, parameter groups, construction, gradient clipping."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.schema import DEFAULTS, Clip, Optim
from trainer.distributed.torch_private import BatchNorm
from trainer.errors import ConfigError, listed
from trainer.task import load_object

WITH_STATISTICS = (BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*WITH_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
Groups = list[dict[str, Any]]

SHIPPED: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW,
                                                   "sgd": torch.optim.SGD}
WEIGHT_DECAY: float = DEFAULTS["adamw"]["weight_decay"]


def parameter_groups(model: nn.Module, weight_decay: float | None, rates: Sequence[str] = (),
                     lr: float = 0.0) -> Groups:
    """Split the trainable parameters into two groups for each learning rate, with and without
    weight decay.

    Matrices and kernels decay. Biases, parameters of normalisation layers, and parameters of fewer
    than 2 dimensions do not.

    Args:
        weight_decay: None if the optimizer has none.
        rates: PATTERN=FACTOR of `lr`; the first pattern that matches a name counts.
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
        for decays in (True, False):
            decay = {} if weight_decay is None else {
                "weight_decay": weight_decay if decays else 0.0}
            groups[factor, decays] = {"params": [], **decay, **rate}
    for name, p in trainable.items():
        decays = p.dim() >= 2 and p not in in_norms and name.rpartition(".")[2] != "bias"
        groups[factors[name], decays]["params"].append((name, p))
    return [g for g in groups.values() if g["params"]]


def matching(names: Iterable[str], pattern: str, *, flag: str) -> list[str]:
    """Names that match a file-name pattern (`*`, `?`, `[…]`): at least one, or a ConfigError."""
    known = list(names)
    found = fnmatch.filter(known, pattern)
    if not found:
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.0)
        raise ConfigError(f"--{flag} {pattern}: matches no trainable parameter; similar names "
                          f"are {', '.join(near)}.")
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze parameters; return their names. `!PATTERN` unfreezes; the last match counts.

    Batch norms whose parameters are all frozen are put in eval mode, so their statistics are too.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        trainable = pattern.startswith("!")
        for name in matching(parameters, pattern.removeprefix("!"), flag="freeze"):
            parameters[name].requires_grad_(trainable)
    for path, module in model.named_modules():
        if patterns and isinstance(module, WITH_STATISTICS) and (
            not any(p.requires_grad for p in module.parameters()) if module.affine
            else _is_frozen(patterns, f"{path}.running_mean")
        ):
            module.eval()
    return [n for n, p in parameters.items() if not p.requires_grad]


@dataclass(frozen=True)
class FrozenAtFirst:
    """Parameters, and modules with statistics, that are frozen until a step of the run."""

    parameters: tuple[Tensor, ...] = ()
    norms: tuple[nn.Module, ...] = ()


def freeze_at_first(model: nn.Module, patterns: Sequence[str]) -> tuple[list[str], FrozenAtFirst]:
    """As `freeze`, for a part of the run: returns the names, and what is to be frozen so long. The
    model is left as it is afterwards."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norms = [m for m in model.modules() if m.training]
    names = freeze(model, patterns)
    found = FrozenAtFirst(tuple(p for p in trained if not p.requires_grad),
                          tuple(m for m in norms if not m.training))
    for parameter in found.parameters:
        parameter.requires_grad_(True)
    for module in found.norms:
        module.train()
    return names, found


def _is_frozen(patterns: Sequence[str], name: str) -> bool:
    """Whether the last pattern that matches the name freezes it."""
    matches = [p for p in patterns if fnmatch.fnmatchcase(name, p.removeprefix("!"))]
    return bool(matches) and not matches[-1].startswith("!")


def make_optimizer(config: Optim, model: nn.Module,
                   groups: Callable[[nn.Module], Groups] | None = None) -> torch.optim.Optimizer:
    """Build the configured optimizer for the model's trainable parameters. A setting that the
    optimizer doesn't read is refused.

    Args:
        groups: `parameter_groups` of the task; None if the task does not define it.
    """
    cls: Any = SHIPPED.get(config.name) or load_object(config.name, flag="--optim.name")
    arguments = _arguments(config, cls, model)
    if groups is None:
        made = parameter_groups(model, arguments.get("weight_decay"), config.rates, config.lr)
    else:
        config.check(not config.rates, "rates", "the task defines parameter_groups(); set the "
                     "rates (\"lr\") there.", " ".join(config.rates))
        made = _checked(groups(model), model)
        _refuse_overridden(config, made)
    if not made:
        raise ConfigError("--task, --freeze: there is no parameter to train: the model has none, "
                          "all are frozen, or the task's parameter_groups(model) is empty.")
    try:
        optimizer = cls(made, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--optim.name {config.name}: calling it with parameter groups (those of the task's "
            f"parameter_groups(), if defined) and {', '.join(arguments)} raised {error}."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"--optim.name {config.name}: it is not a torch.optim.Optimizer, so its "
                          "state could not be saved; derive it from that class.")
    named = inspect.signature(cls).parameters
    for key in _given(config):  # **kwargs may have dropped it
        if key not in named and key not in optimizer.defaults:
            raise ConfigError(f"{_flags(config)[key]}: {config.name} doesn't read it; omit it.")
    for key in {key: None for group in made for key in group if groups is not None}:
        near = difflib.get_close_matches(key, optimizer.defaults, n=1, cutoff=0.85)
        if near and key not in optimizer.defaults:  # torch would ignore it
            raise ConfigError(f"--task: parameter_groups(model) has {key!r}, which "
                              f"{type(optimizer).__name__} does not use; did you mean "
                              f"{near[0]!r}?")
    if has_modes(optimizer):
        config.check(not config.ema, "ema", f"{config.name} has an average of its own, in its "
                     "eval(); leave out --optim.ema.")
        set_mode(optimizer, training=True)
    return optimizer


def expected_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Tensors of the sizes that the first update of AdamW and SGD adds to the optimizer's state;
    empty for other optimizers, whose state nobody knows before."""
    expected: dict[Tensor, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        if type(optimizer) is torch.optim.AdamW:
            keys = ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * bool(group["amsgrad"]))
        else:
            is_sgd = type(optimizer) is torch.optim.SGD
            keys = ("momentum_buffer",) * (is_sgd and group["momentum"] != 0)
        for parameter in group["params"] if keys else ():
            expected[parameter] = dict.fromkeys(keys, parameter)
            if group["fused"] and "exp_avg" in keys:  # otherwise it is on the host
                expected[parameter]["step"] = parameter.new_empty((), dtype=torch.float32)
    return expected


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the model's parameters hold other weights in evaluation, by `eval()` and `train()` of
    the optimizer (as a schedule-free one has)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def set_mode(optimizer: Any, *, training: bool) -> None:
    """Put an optimizer that has modes in one of them."""
    with torch.no_grad():
        getattr(optimizer, "train" if training else "eval")()


def _arguments(config: Optim, cls: Any, model: nn.Module) -> dict[str, Any]:
    """The arguments for an optimizer's class, besides the groups: those set that it takes."""
    refuse_closure(cls, f"--optim.name {config.name}")
    # The first one receives the groups.
    takes = dict([*inspect.signature(cls).parameters.items()][1:])
    any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    given, flags = _given(config), _flags(config)
    if given.get("weight_decay") == 0 and "weight_decay" not in takes:
        del given["weight_decay"]  # without decay, as it is
    for key in given:
        if key not in takes and not any_name:
            own = [name for name in takes if name not in ("lr", *_settings(config))]
            raise ConfigError(f"{flags[key]}: {config.name} doesn't read it; omit it. Its options "
                              f"are {', '.join(own) or 'none'}.")
        default = takes[key].default if key in takes else None
        if isinstance(default, bool) and not isinstance(given[key], bool):
            raise ConfigError(f"{flags[key]}: expected true or false.")
    arguments: dict[str, Any] = {"lr": config.lr}
    if any_name or "weight_decay" in takes:
        arguments["weight_decay"] = WEIGHT_DECAY
    if config.name in SHIPPED:
        trained = [p for p in model.parameters() if p.requires_grad]
        arguments["fused"] = all(map(_is_whole, trained)) or None
    return arguments | given


def refuse_closure(cls: Any, what: str) -> None:
    """Refuse an optimizer whose `step` needs an argument."""
    step = inspect.signature(cls.step).parameters if hasattr(cls, "step") else {}
    if needed := [p.name for p in list(step.values())[1:]
                  if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]:
        raise ConfigError(f"{what}: its step() requires {needed[0]}, to compute the loss several "
                          "times per update; the trainer computes it once. Use an optimizer that "
                          "needs no such argument, such as adamw.")


def _settings(config: Optim) -> dict[str, Any]:
    """Arguments of an optimizer's class that have a flag, besides lr; None: not set."""
    nesterov = None if config.nesterov is None else config.nesterov == "on"
    return {"weight_decay": config.weight_decay, "betas": config.betas, "eps": config.eps,
            "momentum": config.momentum, "nesterov": nesterov}


def _given(config: Optim) -> dict[str, Any]:
    """The arguments of the optimizer's class that the configuration sets, besides lr."""
    given = {key: value for key, value in _settings(config).items() if value is not None}
    for text in config.options:
        key, _, value = text.partition("=")
        if key in ("lr", *given):
            raise ConfigError(f"--optim.options {text}: use --optim.{key.replace('_', '-')}.")
        given[key] = _parsed(value)
    return given


def _flags(config: Optim) -> dict[str, str]:
    """Each argument that the configuration may set → its flag, with the value."""
    flags = {text.partition("=")[0]: f"--optim.options {text}" for text in config.options}
    for key in ("lr", *_settings(config)):
        value = getattr(config, key)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        flags.setdefault(key, f"--optim.{key.replace('_', '-')} {shown}")
    return flags


def _parsed(text: str) -> Any:
    """The value of an option: a tuple of several, a boolean, None, a number or a string."""
    if "," in text:
        return tuple(_parsed(part) for part in text.split(",") if part)
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _refuse_overridden(config: Optim, groups: Groups) -> None:
    """Refuse a setting that each of the task's groups sets itself."""
    default = Optim(name=config.name)
    plain = {"lr": default.lr, **_given(default)}
    for key, value in {"lr": config.lr, **_given(config)}.items():
        if all(key in group for group in groups) and (key not in plain or plain[key] != value):
            raise ConfigError(f"{_flags(config)[key]}: each group of the task's parameter_groups() "
                              f"sets {key!r} itself, so the flag would have no effect; omit it.")


def untrained(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of the parameters that are not frozen and in no group of the optimizer."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in held]


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's memory has no gaps, as that of a slice (`weight[:, :1]`) has: a fused
    kernel on CPU walks the memory from end to end and would update them too."""
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _checked(made: Any, model: nn.Module) -> Groups:
    """Drop empty groups of a task, and refuse tensors that no checkpoint would hold."""
    what, own = "--task: parameter_groups(model)", set(model.parameters())
    if not isinstance(made, list | tuple) or not all(
            isinstance(g, Mapping) and "params" in g for g in made):
        raise ConfigError(f"{what} must return a list of dicts, each with params.")
    groups = [{**g, "params": [g["params"]] if isinstance(g["params"], Tensor)
               else list(g["params"])} for g in made]
    for entry in (p for g in groups for p in g["params"]):
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(parameter, Tensor) and parameter not in own:
            raise ConfigError(f"{what} has a tensor of shape {tuple(parameter.shape)} that is "
                              "not a parameter of the model, so no checkpoint would hold it.")
    return [g for g in groups if g["params"]]


def sparse_gradient_problem(optimizer: torch.optim.Optimizer, clipping: Clip,
                            sparse: Mapping[Tensor, str]) -> str:
    """Why torch's optimizer or clipping cannot use gradients of the `sparse` parameters (→ their
    names); "" if it can."""
    kinds = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
    plain = all(not g.get("fused") and not g.get("weight_decay") for g in optimizer.param_groups
                if not sparse.keys().isdisjoint(g["params"]))
    torchs = type(optimizer).__module__.startswith("torch.optim")
    if not sparse or (not clipping.value and (
            not torchs or (isinstance(optimizer, kinds) and plain))):
        return ""
    return (f"the gradient of {listed(sparse.values())} is sparse: use sparse=False in embeddings, "
            "or --optim.name torch.optim:SGD or torch.optim:Adagrad with --optim.weight-decay 0 "
            "and without --clip.value")


def clip(parameters: list[Tensor], config: Clip) -> Tensor:
    """Clip the gradients in place: by value if `config.value` is set, otherwise by global norm.

    Returns the global L2 norm before clipping. If it is not finite, gradients are not clipped by
    norm; the caller must check it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    # As `get_total_norm`, which sums parameters of several dtypes in another order.
    norm = (torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values))) if values
            else torch.tensor(0.0))
    if config.value > 0:
        torch.nn.utils.clip_grad_value_(parameters, config.value)
    elif (limit := config.norm or 0.0) and not (norm.is_cpu and float(norm) < 0.999 * limit):
        # A norm that is not finite counts as 0, which changes no gradient: otherwise one NaN would
        # spread to all gradients and hide its origin.
        finite = norm.nan_to_num(0.0, 0.0, 0.0)
        # The factor of `clip_grads_with_norm_`, which groups tensors by device on each call.
        torch._foreach_mul_(gradients, (limit / (finite + 1e-6)).clamp(max=1.0))
    return norm
