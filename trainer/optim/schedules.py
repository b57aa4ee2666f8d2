"""Learning-rate schedules of torch, stepped once per update (`plateau`: once per validation)."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from trainer.config.fields import Duration
from trainer.config.schema import Schedule
from trainer.errors import ConfigError
from trainer.task import load_object

CLASSES: dict[str, type] = {
    "cosine-annealing": lr_scheduler.CosineAnnealingLR,
    "one-cycle": lr_scheduler.OneCycleLR,
    "warm-restarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "linear": lr_scheduler.LinearLR,
    "multi-step": lr_scheduler.MultiStepLR,
    "plateau": lr_scheduler.ReduceLROnPlateau,
}
"""Name → class. All other schedules are functions of the update's number, under LambdaLR."""

LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "milestones")
INTEGERS = ("T_mult", "patience", "cooldown")
MOVED = ("lr", "betas", "momentum")
"""Entries of a parameter group that a schedule may change (of a tuple, the first number)."""
COUNTERS = ("last_epoch", "_step_count", "T_cur", "T_i", "num_bad_epochs", "cooldown_counter")


class Lengths(Protocol):
    """Lengths that a schedule depends on, in optimizer steps."""

    epoch: int
    total: int


def factor(config: Schedule, update: int, *, epoch: int, total: int) -> float:
    """Learning rate of an update as a fraction of the peak, for `cosine` and `constant`.

    The warm-up rises linearly from 1 / steps (an update with rate 0 would have no effect) and
    reaches the peak at its last step. The cosine reaches `min_ratio` at the run's last update and
    stays there.

    Args:
        update: number of the update, from 0.
        epoch: optimizer steps in an epoch.
        total: optimizer steps in the run.
    """
    warmup = min(config.warmup.steps(epoch=epoch, total=total), total)
    if update < warmup:
        return (update + 1) / warmup
    if config.name == "constant":
        return 1.0
    done = min(1.0, (update + 1 - warmup) / max(1, total - warmup))
    return config.min_ratio + (1 - config.min_ratio) * (1 + math.cos(math.pi * done)) / 2


class Scheduler:
    """The configured scheduler of torch, preceded by a warm-up.

    A schedule given by a function covers all updates of the run. One of torch's classes starts
    with the last update of the warm-up, a `LinearLR` that ends at the class's initial rate.
    SequentialLR with a milestone there gives the same rates, but does not support
    ReduceLROnPlateau.

    Args:
        optimizer: its groups have the peak rate.
        lengths: may change before `load_state_dict`, which builds the schedule again.

    Raises:
        ConfigError: the class does not have an option, or refuses its value.
    """

    def __init__(
        self, config: Schedule, optimizer: torch.optim.Optimizer, lengths: Lengths
    ) -> None:
        self._config, self._optimizer, self._lengths = config, optimizer, lengths
        self._peaks = [{k: g[k] for k in MOVED if k in g} for g in optimizer.param_groups]
        self.metric, self._direction = "", "min"
        if config.name == "plateau":
            rule = config.arguments.get("metric", "val_loss:min")
            self.metric, _, self._direction = rule.rpartition(":")
            if self._direction not in ("min", "max") or not self.metric.startswith("val_"):
                raise ConfigError(f"--schedule.options metric={rule}: write NAME:max or NAME:min, "
                                  "such as val_loss:min.")
        self._build()

    def _build(self) -> None:
        """Create the schedulers, in their state before the first update."""
        groups = self._optimizer.param_groups
        for group, peak in zip(groups, self._peaks, strict=True):
            group.pop("initial_lr", None)
            group.update(peak)
        self.updates, self._warmup = 0, None
        epoch, total = self._lengths.epoch, self._lengths.total
        warmup = max(1, min(self._config.warmup.steps(epoch=epoch, total=total), total))
        self._first = warmup - 1
        if self._config.name not in CLASSES:
            self._first = 0
            self._main: Any = lr_scheduler.LambdaLR(self._optimizer, self._factors(warmup))
            return
        self._main = self._make(CLASSES[self._config.name])
        self._starts = [group["lr"] for group in groups]
        for group, start in zip(groups, self._starts, strict=True):
            group.setdefault("initial_lr", start)
        if self._first:
            self._warmup = lr_scheduler.LinearLR(
                self._optimizer, start_factor=1 / warmup, total_iters=self._first)

    def _factors(self, warmup: int) -> Callable[[int], float]:
        """The function from the number of an update to its factor, warm-up included."""
        config, lengths = self._config, self._lengths
        if ":" not in config.name:
            return lambda update: factor(config, update, epoch=lengths.epoch, total=lengths.total)
        function, first = load_object(config.name, flag="--schedule.name"), warmup - 1

        def checked(update: int) -> float:
            if not 0 <= (value := float(function(update))) < math.inf:
                raise ConfigError(f"--schedule.name {config.name}: for update {update} it returned "
                                  f"{value}; it must return a factor of --optim.lr, 0 or more.")
            return value

        try:
            if checked(first) != checked(first):
                raise ValueError("nothing, but a second call returned another value: it must "
                                 "depend on that number alone")
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"--schedule.name {config.name}: called with the number of an "
                              f"update, {first}, it raised {type(error).__name__}: {error}. It "
                              "must return a factor of --optim.lr.") from error
        return lambda update: (checked(update) if update >= first
                               else checked(first) * (update + 1) / warmup)

    def _make(self, cls: type) -> Any:
        """Create one of torch's classes; the length of the run gives the options not set."""
        name, left = self._config.name, max(1, self._lengths.total - 1 - self._first)
        given = {key: self._value(cls, key, text)
                 for key, text in self._config.arguments.items() if key != "metric" or not
                 self.metric}
        if name == "multi-step":  # milestones are positions in the run, warm-up included
            given["milestones"] = [m - self._first for m in given.get("milestones", [0])]
            if min(given["milestones"]) <= 0:
                raise ConfigError("--schedule.name multi-step: it needs milestones after the "
                                  "warm-up, such as --schedule.options milestones=30ep,60ep.")
        defaults: dict[str, dict[str, Any]] = {
            "cosine-annealing": {"T_max": left},
            "one-cycle": {"max_lr": [peak["lr"] for peak in self._peaks], "total_steps": left + 1},
            "warm-restarts": {"T_0": self._lengths.epoch},
            "linear": {"start_factor": 1.0, "end_factor": self._config.min_ratio,
                       "total_iters": left},
            "plateau": {"mode": self._direction},
        }
        try:
            return cls(self._optimizer, **{**defaults.get(name, {}), **given})
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"--schedule.name {name} with --schedule.options "
                              f"{' '.join(self._config.options) or 'empty'}: {cls.__name__} "
                              f"raised {error}.") from error

    def _value(self, cls: type, key: str, text: str) -> Any:
        """Parse an option to the type that torch's class expects."""
        flag = f"--schedule.options {key}={text}"
        known = [k for k in inspect.signature(cls).parameters
                 if k not in ("optimizer", "last_epoch", "mode", "epochs", "steps_per_epoch")]
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"{flag}: {cls.__name__} has no such argument; "
                              + (f"did you mean {near[0]}?" if near else "it has "
                                 f"{', '.join(known)}."))
        try:
            if key in LENGTHS:
                lengths = [Duration.parse(part).steps(epoch=self._lengths.epoch,
                                                      total=self._lengths.total)
                           for part in text.split(",")]
                return lengths if key == "milestones" else lengths[0]
            if key in INTEGERS:
                if not text.lstrip("+-").isdecimal():
                    raise ValueError("must be a whole number")
                return int(text)
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}.") from error
        if text in ("true", "false"):
            return text == "true"
        try:
            return float(text)
        except ValueError:
            return text

    def step(self) -> None:
        """Set the rates of the next update, after an update."""
        self.updates += 1
        if self.updates < self._first and self._warmup is not None:
            self._warmup.step()
        elif self._warmup is not None and self.updates == self._first:
            for group, start in zip(self._optimizer.param_groups, self._starts, strict=True):
                group["lr"] = start
        elif not (self.metric or self._is_at_its_end()):
            self._main.step()

    def _is_at_its_end(self) -> bool:
        """Whether the rate stays constant from here on. So it does not rise again in a longer run.
        """
        if self._config.name == "one-cycle":
            return self._main.last_epoch >= self._main.total_steps - 1
        return self._config.name == "cosine-annealing" and self.updates >= self._lengths.total

    def check_metric(self, figures: Sequence[str]) -> None:
        """Check the metric of `plateau` against the metrics of the validation.

        Raises:
            ConfigError: the validation does not compute it.
        """
        if self.metric and self.metric not in figures:
            raise ConfigError(f"--schedule.options metric={self.metric}: the validation does not "
                              f"compute this metric; it computes {', '.join(figures)}.")

    def validated(self, line: Mapping[str, Any]) -> None:
        """Step `plateau` after a validation, from the end of the warm-up on.

        Args:
            line: the validation's line of metrics.jsonl.
        """
        if self.metric and self.updates >= self._first:
            value = line[self.metric]
            self._main.step(math.nan if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        """State without the rates, which are part of the optimizer's state."""
        counters = {k: v for k, v in vars(self._main).items() if k in COUNTERS}
        if self.metric:
            counters["best"] = float(self._main.best).hex()  # infinite before the first validation
        if self._warmup is not None:
            counters["rise"] = [self._warmup.last_epoch, self._warmup._step_count]
        return {"updates": self.updates, "of": self._description(), "counters": counters}

    def _description(self) -> list[Any]:
        config = self._config
        return [config.name, str(config.warmup), config.min_ratio, *config.options,
                self._lengths.epoch, self._lengths.total]

    def load_state_dict(
        self, state: dict[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Restore the state and set the rates.

        If the configuration is unchanged, the rates are the saved ones; otherwise they follow from
        the new configuration.

        Args:
            groups: saved parameter group for each group of the optimizer.
        """
        self._build()
        live = self._optimizer.param_groups
        same = state["of"] == self._description() and all(
            saved.get("initial_lr") == group["initial_lr"]
            for saved, group in zip(groups, live, strict=True))
        if isinstance(self._main, lr_scheduler.LambdaLR):
            self._jump(state["updates"])
        elif same:
            self._restore_counters(state)
            for saved, group, peak in zip(groups, live, self._peaks, strict=True):
                group["lr"] = saved["lr"]
                if "base_momentum" in group and "betas" in peak:
                    group["betas"] = (saved["betas"][0], *peak["betas"][1:])
                elif "base_momentum" in group:
                    group["momentum"] = saved["momentum"]
        else:
            self._replay(state["updates"])
            if self.metric and state["of"][0] == "plateau":
                self._restore_counters(state)
                for saved, group in zip(groups, live, strict=True):
                    group["lr"] = saved["lr"] / saved["initial_lr"] * group["initial_lr"]
        self._main._last_lr = [group["lr"] for group in live]

    def _restore_counters(self, state: Mapping[str, Any]) -> None:
        """Set the positions of the schedulers, and the best value of `plateau`."""
        self.updates, counters = state["updates"], dict(state["counters"])
        warmup, best = counters.pop("rise", None), counters.pop("best", None)
        vars(self._main).update(counters)
        if best is not None:
            self._main.best = float.fromhex(best)
        if warmup is not None and self._warmup is not None:
            self._warmup.last_epoch, self._warmup._step_count = warmup

    def _jump(self, updates: int) -> None:
        """Move a schedule given by a function to an update."""
        self.updates = updates
        if updates:
            self._main.last_epoch = updates - 1
            self._main._step_count = updates + 1  # at 1, torch would warn of a missing update
            self._main.step()
            self._main._step_count = updates + 1

    def _replay(self, updates: int) -> None:
        """Step through all updates, for a schedule that differs from the saved one."""
        with warnings.catch_warnings(action="ignore"):  # torch warns of missing optimizer steps
            for _ in range(updates):
                self.step()


def make_schedule(
    config: Schedule, optimizer: torch.optim.Optimizer, lengths: Lengths
) -> Scheduler:
    """Create the configured scheduler. Call its `step` after each update."""
    return Scheduler(config, optimizer, lengths)
