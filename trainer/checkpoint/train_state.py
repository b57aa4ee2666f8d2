"""The training state that a checkpoint holds: tensors by parameter name, and JSON.

So it does not depend on wrappers of the model (DDP, compile) or on the order of parameter groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer import rng
from trainer.checkpoint.buffers import take_shapes
from trainer.checkpoint.progress import BestTracker, LossMeter, TrainProgress
from trainer.checkpoint.saved_state import SavedState
from trainer.errors import CheckpointDamaged, ConfigError, listed
from trainer.optim.ema import Ema
from trainer.optim.named_optimizers import fill_momentum
from trainer.optim.optimizers import expected_state, has_modes, set_mode
from trainer.storage.layout import EMA, MODEL, OPTIMIZER, STATE

CONFIGURED = frozenset((
    "names", "lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "nesterov",
    "dampening", "amsgrad", "fused", "foreach", "capturable", "differentiable", "maximize",
    "max_lr", "min_lr", "max_momentum", "base_momentum", "optimizer",
))  # fmt: skip
"""Parameter group values set by the configuration; they may change when it changes."""

COUNTERS = frozenset(("step", "mu_product"))
"""Entries of optimizer state that torch keeps on the host, unless `capturable` or `fused` is set:
an update reads them, for which it would wait for a GPU once per parameter."""


@dataclass
class TrainState:
    """Everything that a resumed run needs."""

    model: nn.Module
    """Without DDP or compile wrappers."""
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler
    progress: TrainProgress
    best: BestTracker
    meter: LossMeter
    seed: int
    num_ranks: int
    parts: dict[str, Any] = field(default_factory=dict)
    """Further parts by name, with `state_dict` and `load_state_dict` (JSON values); with `share`
    (collective) if the state is distributed over the ranks."""
    ema: Ema | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, by dotted name."""

    def __post_init__(self) -> None:
        self._structure = self._current_structure()
        self._parameters = dict(self.model.named_parameters())
        # Tensors and facts of the training, while the optimizer is in evaluation mode.
        self._training: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None

    def _current_structure(self) -> dict[str, bool]:
        """Name of each of the model's tensors → whether it is trained."""
        trained = {p.data_ptr() for p in self.model.parameters() if p.requires_grad}
        return {name: tensor.data_ptr() in trained for name, tensor in model_tensors(self.model)}

    @property
    def cycle_ends(self) -> list[int]:
        """Steps whose checkpoints are kept for good, with --checkpoint.keep-every cycle."""
        return self.parts["cycles"].ends if "cycles" in self.parts else []

    @property
    def ends_cycle(self) -> bool:
        """Whether the last step is one of them."""
        return self.progress.step in self.cycle_ends[-1:]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors of the model, the optimizer ("PARAMETER|KEY") and the averaged weights,
        by file and name. Raises ConfigError as `check_structure`."""
        if self._training is not None:
            return self._training[0]
        self.check_structure()
        model, optimizer = dict(model_tensors(self.model)), self.optimizer_tensors()
        if self.ema is None:
            return {MODEL: model, OPTIMIZER: optimizer}
        return {MODEL: model | self.ema.weights(), OPTIMIZER: optimizer, EMA: self.ema.tensors()}

    def check_structure(self) -> None:
        """Raises ConfigError if the forward added, removed, replaced or unfroze parameters or
        buffers."""
        now = self._current_structure()
        names = now.keys() ^ self._structure.keys() | {
            n for n in now if now[n] > self._structure.get(n, True)} | {
            n for n, p in self.model.named_parameters() if p is not self._parameters.get(n, p)}
        if names:
            raise ConfigError(
                f"--task: the model's forward has added, removed, replaced or unfrozen "
                f"{listed(sorted(names))}; the optimizer and the checkpoints need the model as "
                "model() returns it: do it there.")

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Context in which the model holds the weights for validation and export: their moving
        average, or those of the optimizer's `eval()`. A save in it holds those of the training."""
        if self.ema is not None:
            with self.ema.exchanged():
                yield
            return
        if not has_modes(self.optimizer):
            yield
            return
        copies = {file: {name: tensor.detach().clone() for name, tensor in tensors.items()}
                  for file, tensors in self.tensors().items()}
        self._training = copies, self.optimizer_facts()
        set_mode(self.optimizer, training=False)
        try:
            yield
        finally:
            set_mode(self.optimizer, training=True)
            self._training = None
            # train() undoes eval() only up to rounding.
            for file, live in self.tensors().items():
                copy_into(live, copies[file], file)

    def export_weights(self) -> dict[str, Tensor]:
        """Copies on the host of the weights for export."""
        with self.evaluation_weights():
            return {name: t.detach().cpu().clone() for name, t in model_tensors(self.model)}

    def facts(self) -> dict[str, Any]:
        """All state except tensors and generators, as JSON values."""
        return {
            "progress": self.progress.state_dict(),
            "best": self.best.state_dict(),
            "meter": self.meter.state_dict(),
            "optimizer": self.optimizer_facts() if self._training is None else self._training[1],
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            **({} if self.ema is None else {"ema": self.ema.state_dict()}),
        }

    def share(self) -> None:
        """Collective. Exchange distributed state before a save; without it `facts` may contain an
        older, consistent state of some parts."""
        for part in self.parts.values():
            if hasattr(part, "share"):
                part.share()

    def rng_digests(self, step: int) -> list[str]:
        """Digests of all ranks' generators at a step boundary."""
        return [rng.digest(rng.keyed(self.seed, rng.STEP, step, rank))
                for rank in range(self.num_ranks)]

    def key_rng(self, rank: int) -> None:
        """Seed this process's generators for the current step boundary."""
        rng.seed_all(self.seed, rng.STEP, self.progress.step, rank)

    def load(self, tensors: dict[str, dict[str, Tensor]], saved: SavedState) -> None:
        """Restore everything, into the live tensors. Raises CheckpointDamaged if a tensor is
        missing, unknown or has another shape.

        An optimizer of another --optim.name begins without state, and so do parameters that
        another --freeze trains. An option that has changed has its new value."""
        try:
            self._load(tensors, saved)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The parts load what they saved; torch and the task's optimizer have their own.
            raise CheckpointDamaged(
                f"{STATE}: a part can't load it: {type(error).__name__}: {error}") from error
        if "epoch" in self.parts and "epoch" in saved.parts:  # else the task has got `epoch` since
            # Calls the task, whose errors are no damage.
            self.parts["epoch"].load_state_dict(saved.parts["epoch"])

    def _load(self, tensors: dict[str, dict[str, Tensor]], saved: SavedState) -> None:
        self.load_weights(tensors, saved)
        groups = self.load_optimizer(tensors[OPTIMIZER], saved.optimizer, saved.settings)
        self.progress.restore(saved.progress)
        self.best.restore(saved.best)
        self.meter.load_state_dict(saved.meter)
        if self.scaler.is_enabled() and saved.scaler:
            self.scaler.load_state_dict(saved.scaler)
        for name, part in self.parts.items():
            if name == "epoch" or (name == "cycles" and name not in saved.parts):
                continue  # see `load`; --checkpoint.keep-every may have changed
            if name not in saved.parts:
                raise CheckpointDamaged(f"{STATE} has no entry {name!r} in 'parts'")
            part.load_state_dict(saved.parts[name])
        # After the horizon (one of the parts), on which the schedule is based.
        self.schedule.load_state_dict(saved.schedule, groups)

    def load_weights(self, tensors: dict[str, dict[str, Tensor]], saved: SavedState) -> None:
        """Restore only parameters, buffers and averages. Raises CheckpointDamaged as `load`."""
        take_shapes(self.model, tensors[MODEL])
        copy_into(dict(model_tensors(self.model)), tensors[MODEL], "model")
        if self.ema is not None:
            self.ema.load(tensors.get(EMA), saved.ema,
                          extended=self._differs(saved.settings, "freeze"))

    def nonfinite_parameters(self, tensors: dict[str, Tensor]) -> list[str]:
        """Names of the trained parameters with NaN or infinite values in a copy of the model: those
        that were trainable at the start, since a step freezes some for a time (turns)."""
        return [n for n, t in tensors.items() if self._structure.get(n) and not _is_finite(t)]

    def names(self) -> dict[Tensor, str]:
        return {p: n for n, p in self.model.named_parameters()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        names = self.names()
        return {f"{names[parameter]}|{key}": value
                for parameter, entries in self.optimizer.state.items()
                for key, value in entries.items() if isinstance(value, Tensor)}

    def expected_optimizer_tensors(self) -> dict[str, Tensor]:
        """Tensors like those of `optimizer_tensors`, which the first update creates."""
        names = self.names()
        return self.optimizer_tensors() or {
            f"{names[parameter]}|{key}": like
            for parameter, entries in expected_state(self.optimizer).items()
            for key, like in entries.items()}

    def optimizer_facts(self) -> dict[str, Any]:
        names = self.names()
        groups = [{"names": [names[p] for p in group["params"]],
                   **{k: v for k, v in group.items()
                      if k not in ("params", "param_names") and fits_json(v)}}
                  for group in self.optimizer.param_groups]
        values = {names[parameter]: {k: _to_json(v) for k, v in entries.items()
                                     if not isinstance(v, Tensor)}
                  for parameter, entries in self.optimizer.state.items()}
        return {"groups": groups, "values": values}

    def _differs(self, then: Mapping[str, Any], name: str) -> bool:
        """Whether a setting differs from a saved one."""
        return name in then and then[name] != self.settings.get(name)

    def load_optimizer(
        self, tensors: dict[str, Tensor], facts: dict[str, Any],
        then: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Restore the optimizer of a run that had the settings `then`, by default the same ones.
        Returns the saved parameter group of each live group, empty for a new one."""
        names, then = self.names(), self.settings if then is None else then
        parameters = {n: p for p, n in names.items()}
        of = {name: group for group in facts["groups"] for name in group["names"]}
        live = {names[p] for g in self.optimizer.param_groups for p in g["params"]}
        if not self._differs(then, "freeze"):
            _same_names(set(of), live, "optimizer")
        state = {n: {k: _from_json(v) for k, v in entries.items()}
                 for n, entries in facts["values"].items()}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("|")
            if parameter not in parameters:
                raise CheckpointDamaged(f"optimizer: entry of unknown parameter {parameter!r}")
            state.setdefault(parameter, {})[key] = value
        before = dict(self.optimizer.state)
        self.optimizer.state.clear()
        anew = self._differs(then, "optim.name")
        group_of = {p: g for g in self.optimizer.param_groups for p in g["params"]}
        expected = expected_state(self.optimizer)
        for name in [] if anew else [name for name in state if name in live]:
            owner = parameters[name]
            _check_entries(name, state[name], expected.get(owner, {}))
            in_kernels = any(group_of[owner].get(o) for o in ("capturable", "fused"))
            self.optimizer.state[owner] = {
                key: value if not isinstance(value, Tensor) else _placed(
                    value, owner, before.get(owner, {}).get(key),
                    on_host=key in COUNTERS and not in_kernels)
                for key, value in state[name].items()}
        if self._differs(then, "freeze") or self._differs(then, "freeze_until"):
            fill_momentum(self.optimizer)
        groups: list[dict[str, Any]] = [
            next((of[names[p]] for p in group["params"] if names[p] in of), {})
            for group in self.optimizer.param_groups]
        configured = CONFIGURED | self._changed_options(then)
        for group, saved_group in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in () if anew else saved_group.items():
                if key not in configured:  # counters of the optimizer, possibly added later
                    as_now = isinstance(value, list) and key in group
                    group[key] = type(group[key])(value) if as_now else value
        return groups

    def _changed_options(self, then: Mapping[str, Any]) -> set[str]:
        """Names of the options of the optimizer that are not as they were."""
        before, now = ({*settings.get("optim.options", ())} for settings in (then, self.settings))
        return {text.partition("=")[0] for text in before ^ now}


def _check_entries(
    name: str, saved: Mapping[str, Any], expected: Mapping[str, Tensor]
) -> None:
    """Raises CheckpointDamaged unless the optimizer's state of a parameter is what an update needs.
    Momentum and a maximum may be missing, if an option has changed."""
    for key, like in expected.items() if saved else ():
        value = saved.get(key)
        if value is None and key in ("momentum_buffer", "max_exp_avg_sq"):
            continue
        fits = isinstance(value, Tensor) and value.shape == like.shape and (
            value.dtype in (like.dtype, torch.float32, torch.bfloat16))
        if not fits:
            raise CheckpointDamaged(f"optimizer: {key} of {name} is missing or has another shape "
                                    "or type")


def _placed(value: Tensor, parameter: Tensor, before: Any, *, on_host: bool) -> Tensor:
    """An entry of optimizer state with the saved dtype, on the device of the entry `before` it, or
    else on the host or where the parameter is, with the parameter's memory layout."""
    device = torch.device("cpu") if on_host else parameter.device
    if isinstance(before, Tensor):
        device = before.device
    if value.shape != parameter.shape or device != parameter.device:
        return value.to(device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def model_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in model.state_dict(keep_vars=False).items() if isinstance(t, Tensor)]


def copy_into(live: dict[str, Tensor], saved: dict[str, Tensor], what: str) -> None:
    _same_names(set(saved), set(live), what)
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointDamaged(f"{what}: {name} has shape {tuple(saved[name].shape)} in the "
                                    f"checkpoint and {tuple(tensor.shape)} in this run")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def _same_names(saved: set[str], live: set[str], what: str) -> None:
    if saved != live:
        parts = []
        if live - saved:
            parts.append(f"missing from the checkpoint: {listed(sorted(live - saved))}")
        if saved - live:
            parts.append(f"unknown to this run: {listed(sorted(saved - live))}")
        raise CheckpointDamaged(f"{what}: {'; '.join(parts)}")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. The writer thread calls this, where torch would start further
    threads; numpy doesn't."""
    if tensor.dtype in (torch.float32, torch.float64, torch.float16):
        return bool(np.isfinite(tensor.numpy()).all())
    if tensor.dtype is torch.bfloat16:  # in a NaN or infinity all exponent bits are set
        exponents = tensor.view(torch.int16).numpy() & 0x7F80
        return not bool((exponents == 0x7F80).any())
    return bool(torch.isfinite(tensor).all())


_TUPLE = "a tuple of"


def _to_json(value: Any) -> Any:
    """A JSON value; a tuple is marked."""
    return {_TUPLE: list(value)} if type(value) is tuple else value


def _from_json(value: Any) -> Any:
    return tuple(value[_TUPLE]) if isinstance(value, dict) and _TUPLE in value else value


def fits_json(value: Any) -> bool:
    """Whether a value can be stored as JSON; a nested tuple comes back as a list."""
    if isinstance(value, tuple | list):
        return all(fits_json(v) for v in value)
    if type(value) is dict:
        return all(isinstance(k, str) and fits_json(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)
