"""What must survive a death: each part listed once, in `TrainState`.

Tensors are keyed by parameter name and everything else is JSON, so that a checkpoint loads with
nothing but safetensors and json, under any nesting of DDP and compile, into groups of any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trainer import rng
from trainer.ema import Ema
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.progress import Best, LossMeter, Progress

MODEL, OPTIMIZER, EMA = "model.safetensors", "optimizer.safetensors", "ema.safetensors"

CONFIGURED = frozenset((
    "names", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "nesterov",
    "dampening", "amsgrad", "fused", "foreach", "capturable", "differentiable", "maximize",
    "max_lr", "min_lr", "max_momentum", "base_momentum",
))  # fmt: skip
"""Values of a parameter group that follow from the configuration, and so may change with it."""


class Stateful(Protocol):
    """A part of the run whose state is a JSON value."""

    def state_dict(self) -> dict[str, Any]:
        """What has to come back."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        ...


@runtime_checkable
class Shared(Protocol):
    """A part of which each rank knows something that the others don't."""

    def share(self) -> None:
        """Collective. Tell each other, before a save."""
        ...


@dataclass
class TrainState:
    """The one assembly of everything that must survive.

    Args:
        model: the plain model, neither wrapped nor compiled under another name.
        parts: further resumable parts by name; each one's state is JSON.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    progress: Progress
    best: Best
    meter: LossMeter
    seed: int
    num_ranks: int
    parts: dict[str, Stateful] = field(default_factory=dict)
    ema: Ema | None = None

    def __post_init__(self) -> None:
        self._form = self._formed()

    def _formed(self) -> dict[str, bool]:
        """The model's tensors, and whether they are trained, by name."""
        trained = {p.data_ptr() for p in self.model.parameters() if p.requires_grad}
        return {name: tensor.data_ptr() in trained for name, tensor in _model_tensors(self.model)}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """File name → tensor name → tensor, of the model (parameters and buffers), of the
        optimizer ("PARAMETER|KEY") and of the averaged weights. The live tensors: copy before the
        next step.

        Raises:
            ConfigError: see `check_form`.
        """
        self.check_form()
        model, optimizer = dict(_model_tensors(self.model)), self._optimizer_tensors()
        if self.ema is None:
            return {MODEL: model, OPTIMIZER: optimizer}
        return {MODEL: model | self.ema.weights(), OPTIMIZER: optimizer, EMA: self.ema.tensors()}

    def check_form(self) -> None:
        """Raises: ConfigError: the forward has made the model another one than it was, in what a
        checkpoint holds of it."""
        now = self._formed()
        names = now.keys() ^ self._form.keys() | {
            n for n in now if now[n] > self._form.get(n, True)}
        if names:
            raise ConfigError(
                f"--task: the model's forward has made, taken away or unfrozen "
                f"{', '.join(sorted(names)[:5])}{', …' * (len(names) > 5)}; optimizer and "
                "checkpoints know the model as model() makes it: do it there.")

    def product(self) -> dict[str, Tensor]:
        """The weights that are validated and exported: the average where there is one."""
        model = dict(_model_tensors(self.model))
        return model if self.ema is None else model | self.ema.averages()

    def facts(self) -> dict[str, Any]:
        """Everything that is no tensor, as JSON, but for `rng_digests`."""
        return {
            "progress": self.progress.state_dict(),
            "best": self.best.state_dict(),
            "meter": self.meter.state_dict(),
            "optimizer": self._optimizer_facts(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            **({} if self.ema is None else {"ema": self.ema.state_dict()}),
        }

    def share(self) -> None:
        """Collective. Before a save: ranks tell each other what only some of them know. Without,
        `facts` are right too, but parts of it may be older ones to go on from."""
        for part in self.parts.values():
            if isinstance(part, Shared):
                part.share()

    def rng_digests(self, step: int) -> list[str]:
        """The digests of all ranks' generators at a step boundary, in any thread: generators are
        functions of (seed, step, rank), so any rank knows all of them."""
        return [rng.digest(rng.keyed(self.seed, rng.STEP, step, rank))
                for rank in range(self.num_ranks)]

    def key_rng(self, rank: int) -> None:
        """Key this process's generators for the boundary of the current step."""
        rng.key_generators(self.seed, rng.STEP, self.progress.step, rank)

    def load(self, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any]) -> None:
        """Put everything back, in the storage that is in use.

        Raises:
            CheckpointDamaged: names a missing, unknown or differently shaped entry.
        """
        self.load_model(tensors[MODEL])
        if self.ema is not None:
            self.ema.load(tensors.get(EMA), facts.get("ema", {}))
        groups = self._load_optimizer(tensors[OPTIMIZER], _entry(facts, "optimizer"))
        self.progress.load_state_dict(_entry(facts, "progress"))
        self.best.load_state_dict(_entry(facts, "best"))
        self.meter.load_state_dict(_entry(facts, "meter"))
        if self.scaler.is_enabled() and _entry(facts, "scaler"):
            self.scaler.load_state_dict(facts["scaler"])
        for name, part in self.parts.items():
            part.load_state_dict(_entry(_entry(facts, "parts"), name))
        # After the horizon that it was made for.
        self.schedule.load_state_dict(_entry(facts, "schedule"), groups)

    def load_model(self, tensors: dict[str, Tensor]) -> None:
        """Put back the model's parameters and buffers only.

        Raises:
            CheckpointDamaged: see `load`.
        """
        _copy_into(dict(_model_tensors(self.model)), tensors, "model")

    def sick(self, tensors: dict[str, Tensor]) -> list[str]:
        """The trainable parameters, of a copy of the model's tensors, that aren't finite."""
        trainable = {n for n, p in self.model.named_parameters() if p.requires_grad}
        return [n for n, t in tensors.items() if n in trainable and not _is_finite(t)]

    def still(self, tensors: dict[str, dict[str, Tensor]]) -> set[int]:
        """Addresses of those of `tensors` that only an update moves: all but buffers."""
        parameters = {p.data_ptr() for p in self.model.parameters()}
        others = [t for name in tensors if name != MODEL for t in tensors[name].values()]
        return parameters | {t.data_ptr() for t in others}

    def names(self) -> dict[Tensor, str]:
        """Parameter → its plain name."""
        return {p: n for n, p in self.model.named_parameters()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = self.names()
        return {
            f"{names[parameter]}|{key}": value
            for parameter, entries in self.optimizer.state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }

    def _optimizer_facts(self) -> dict[str, Any]:
        names = self.names()
        return {
            "groups": [
                {
                    "names": [names[p] for p in group["params"]],
                    **{k: v for k, v in group.items()
                       if k not in ("params", "param_names") and is_plain(v)},
                }
                for group in self.optimizer.param_groups
            ],
            "values": {
                names[parameter]: {k: _written(v) for k, v in entries.items()
                                   if not isinstance(v, Tensor)}
                for parameter, entries in self.optimizer.state.items()
            },
        }

    def _load_optimizer(
        self, tensors: dict[str, Tensor], facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the saved parameter group of each live one."""
        names = self.names()
        parameters = {n: p for p, n in names.items()}
        saved = {name for group in facts["groups"] for name in group["names"]}
        live = {names[p] for g in self.optimizer.param_groups for p in g["params"]}
        _same_names(saved, live, "optimizer")
        state: dict[str, dict[str, Any]] = {
            n: {k: _read(v) for k, v in entries.items()} for n, entries in facts["values"].items()}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("|")
            if parameter not in parameters:
                raise CheckpointDamaged(f"optimizer: an entry for unknown parameter {parameter!r}")
            shape = parameters[parameter].shape
            if value.dim() and value.shape != shape and value.numel() == shape.numel():
                raise CheckpointDamaged(f"optimizer: {name} has shape {tuple(value.shape)}, the "
                                        f"parameter {tuple(shape)}")
            state.setdefault(parameter, {})[key] = value
        self.optimizer.state.clear()
        for name, entries in state.items():
            owner = parameters[name]
            self.optimizer.state[owner] = {
                key: _placed(value, owner) if isinstance(value, Tensor) else value
                for key, value in entries.items()
            }

        of = {name: group for group in facts["groups"] for name in group["names"]}
        groups = [of[names[group["params"][0]]] for group in self.optimizer.param_groups]
        for group, saved_group in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved_group.items():
                if key not in CONFIGURED:  # an optimizer's own counters, which it may add later
                    as_now = isinstance(value, list) and key in group
                    group[key] = type(group[key])(value) if as_now else value
        return groups


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """An entry of optimizer state where the optimizer wants it: counters as they are, moments in
    the layout and on the device of the parameter; the dtype stays the saved one."""
    if value.dim() == 0:
        fused_on_device = parameter.device.type != "cpu"
        return value.to(parameter.device) if fused_on_device else value.clone()
    if value.shape != parameter.shape:
        return value.to(parameter.device).clone()
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in model.state_dict(keep_vars=False).items() if isinstance(t, Tensor)]


def _copy_into(live: dict[str, Tensor], saved: dict[str, Tensor], what: str) -> None:
    _same_names(set(saved), set(live), what)
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointDamaged(f"{what}: {name} has shape {tuple(saved[name].shape)} in the "
                                    f"checkpoint and {tuple(tensor.shape)} here")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def _same_names(saved: set[str], live: set[str], what: str) -> None:
    if saved != live:
        parts = []
        if live - saved:
            parts.append(f"the checkpoint lacks {', '.join(sorted(live - saved)[:5])}")
        if saved - live:
            parts.append(f"there is no {', '.join(sorted(saved - live)[:5])} here")
        raise CheckpointDamaged(f"{what}: {'; '.join(parts)}")


def _entry(facts: dict[str, Any], name: str) -> Any:
    if name not in facts:
        raise CheckpointDamaged(f"state.json has no entry {name!r}")
    return facts[name]


def _is_finite(tensor: Tensor) -> bool:
    """By numpy where it has a way: called in a writer's thread, in which torch would start threads
    of its own beside those that train."""
    if tensor.dtype in (torch.float32, torch.float64, torch.float16):
        return bool(np.isfinite(tensor.numpy()).all())
    if tensor.dtype is torch.bfloat16:  # an infinity or a NaN has all bits of the exponent set
        exponents = tensor.view(torch.int16).numpy() & 0x7F80
        return not bool((exponents == 0x7F80).any())
    return bool(torch.isfinite(tensor).all())


_TUPLE = "a tuple of"


def _written(value: Any) -> Any:
    """As JSON, which has no tuples."""
    return {_TUPLE: list(value)} if type(value) is tuple else value


def _read(value: Any) -> Any:
    return tuple(value[_TUPLE]) if isinstance(value, dict) and _TUPLE in value else value


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it; a tuple comes back as a list."""
    if isinstance(value, tuple | list):
        return all(is_plain(v) for v in value)
    if type(value) is dict:
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)
