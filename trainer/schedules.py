"""Learning-rate schedules: torch's own, stepped once per optimizer update (plateau: validation)."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import lr_scheduler

from trainer.config import Schedule
from trainer.errors import ConfigError
from trainer.length import Length
from trainer.task import load_object

CLASSES: dict[str, type] = {
    "cosine-annealing": lr_scheduler.CosineAnnealingLR,
    "one-cycle": lr_scheduler.OneCycleLR,
    "warm-restarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "linear": lr_scheduler.LinearLR,
    "multi-step": lr_scheduler.MultiStepLR,
    "plateau": lr_scheduler.ReduceLROnPlateau,
}
"""Name → class; everything else is a function of the update's number, under LambdaLR."""

LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "milestones")
INTEGERS = ("T_mult", "patience", "cooldown")
MOVED = ("lr", "betas", "momentum")
"""What a schedule may move in a parameter group; its first number, where there are several."""
COUNTERS = ("last_epoch", "_step_count", "T_cur", "T_i", "num_bad_epochs", "cooldown_counter")


class Lengths(Protocol):
    """What a schedule is laid out for, in optimizer steps."""

    epoch: int
    total: int


def factor(config: Schedule, update: int, *, epoch: int, total: int) -> float:
    """cosine, constant: the rate of the `update`-th update (from 0) as a part of the peak.

    The warm-up rises linearly from 1 / steps (an update with rate 0 would do nothing) and reaches
    the peak at its last step; the cosine reaches `min_ratio` at the run's last update and stays.

    Args:
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
    """torch's scheduler of the configuration, after a warm-up.

    A function gives the factor of each update of the run. One of torch's classes begins with the
    last update of the warm-up (`LinearLR`, to the rate at which the class begins), so that
    SequentialLR with a milestone there gives the same; it refuses ReduceLROnPlateau, this doesn't.

    Args:
        optimizer: with the peak as its groups' rates.
        lengths: may be restored before `load_state_dict`, which lays the schedule out anew.

    Raises:
        ConfigError: an option that the class doesn't have, or a value that it refuses.
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
        self._lay_out()

    def _lay_out(self) -> None:
        """The schedulers as before the first update."""
        groups = self._optimizer.param_groups
        for group, peak in zip(groups, self._peaks, strict=True):
            group.pop("initial_lr", None)
            group.update(peak)
        self.updates, self._rise = 0, None
        epoch, total = self._lengths.epoch, self._lengths.total
        warmup = max(1, min(self._config.warmup.steps(epoch=epoch, total=total), total))
        self._first = warmup - 1
        if self._config.name not in CLASSES:
            self._first = 0
            self._main: Any = lr_scheduler.LambdaLR(self._optimizer, self._function(warmup))
            return
        self._main = self._of_class(CLASSES[self._config.name])
        self._starts = [group["lr"] for group in groups]
        for group, start in zip(groups, self._starts, strict=True):
            group.setdefault("initial_lr", start)
        if self._first:
            self._rise = lr_scheduler.LinearLR(
                self._optimizer, start_factor=1 / warmup, total_iters=self._first)

    def _function(self, warmup: int) -> Callable[[int], float]:
        config, lengths = self._config, self._lengths
        if ":" not in config.name:
            return lambda update: factor(config, update, epoch=lengths.epoch, total=lengths.total)
        function, first = load_object(config.name, flag="--schedule.name"), warmup - 1

        def own(update: int) -> float:
            if not 0 <= (value := float(function(update))) < math.inf:
                raise ConfigError(f"--schedule.name {config.name}: for update {update} its value "
                                  f"is {value}; it gives a factor of --optim.lr, 0 or more.")
            return value

        try:
            if own(first) != own(first):
                raise ValueError("nothing, but gives another value when it is called again: it "
                                 "has to be a function of that number alone")
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"--schedule.name {config.name}: called with the number of an "
                              f"update, {first}, it raised {type(error).__name__}: {error}. It "
                              "gives a factor of --optim.lr.") from error
        return lambda update: (own(update) if update >= first
                               else own(first) * (update + 1) / warmup)

    def _of_class(self, cls: type) -> Any:
        """One of torch's classes with the options of the configuration and, of the run's length,
        what they leave open."""
        name, left = self._config.name, max(1, self._lengths.total - 1 - self._first)
        given = {key: self._value(cls, key, text)
                 for key, text in self._config.arguments.items() if key != "metric" or not
                 self.metric}
        if name == "multi-step":  # places in the run, whatever the warm-up
            given["milestones"] = [m - self._first for m in given.get("milestones", [0])]
            if min(given["milestones"]) <= 0:
                raise ConfigError("--schedule.name multi-step: say where the rate falls, after "
                                  "the warm-up, such as --schedule.options milestones=30ep,60ep.")
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
        """An option as torch's class wants it."""
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
                lengths = [Length.parse(part).steps(epoch=self._lengths.epoch,
                                                    total=self._lengths.total)
                           for part in text.split(",")]
                return lengths if key == "milestones" else lengths[0]
            if key in INTEGERS:
                if not text.lstrip("+-").isdecimal():
                    raise ValueError("a whole number is wanted")
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
        """Move the rates on, after an update."""
        self.updates += 1
        if self.updates < self._first and self._rise is not None:
            self._rise.step()
        elif self._rise is not None and self.updates == self._first:
            for group, start in zip(self._optimizer.param_groups, self._starts, strict=True):
                group["lr"] = start
        elif not (self.metric or self._is_at_its_end()):
            self._main.step()

    def _is_at_its_end(self) -> bool:
        """Whether the rate stays from here on: a run that is made longer doesn't climb again."""
        if self._config.name == "one-cycle":
            return self._main.last_epoch >= self._main.total_steps - 1
        return self._config.name == "cosine-annealing" and self.updates >= self._lengths.total

    def check_metric(self, figures: Sequence[str]) -> None:
        """Raises: ConfigError: a plateau is to be judged by what validations don't give."""
        if self.metric and self.metric not in figures:
            raise ConfigError(f"--schedule.options metric={self.metric}: the validation gives no "
                              f"such figure; it gives {', '.join(figures)}.")

    def validated(self, line: Mapping[str, Any]) -> None:
        """After a validation, its line of metrics.jsonl: what a plateau is judged by; not before
        the end of the warm-up."""
        if self.metric and self.updates >= self._first:
            value = line[self.metric]
            self._main.step(math.nan if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        """All but the rates, which are the optimizer's."""
        counters = {k: v for k, v in vars(self._main).items() if k in COUNTERS}
        if self.metric:
            counters["best"] = float(self._main.best).hex()  # infinite before the first
        if self._rise is not None:
            counters["rise"] = [self._rise.last_epoch, self._rise._step_count]
        return {"updates": self.updates, "of": self._description(), "counters": counters}

    def _description(self) -> list[Any]:
        config = self._config
        return [config.name, str(config.warmup), config.min_ratio, *config.options,
                self._lengths.epoch, self._lengths.total]

    def load_state_dict(
        self, state: dict[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Put it back, and the rates. Those follow from the configuration, so that one that was
        changed on purpose takes effect; unchanged, they are the saved ones.

        Args:
            groups: the saved parameter group of each live one.
        """
        self._lay_out()
        live = self._optimizer.param_groups
        same = state["of"] == self._description() and all(
            saved.get("initial_lr") == group["initial_lr"]
            for saved, group in zip(groups, live, strict=True))
        if isinstance(self._main, lr_scheduler.LambdaLR):
            self._jump(state["updates"])
        elif same:
            self._count(state)
            for saved, group, peak in zip(groups, live, self._peaks, strict=True):
                group["lr"] = saved["lr"]
                if "base_momentum" in group and "betas" in peak:
                    group["betas"] = (saved["betas"][0], *peak["betas"][1:])
                elif "base_momentum" in group:
                    group["momentum"] = saved["momentum"]
        else:
            self._go_through(state["updates"])
            if self.metric and state["of"][0] == "plateau":
                self._count(state)
                for saved, group in zip(groups, live, strict=True):
                    group["lr"] = saved["lr"] / saved["initial_lr"] * group["initial_lr"]
        self._main._last_lr = [group["lr"] for group in live]

    def _count(self, state: Mapping[str, Any]) -> None:
        """Where the schedulers are; of a plateau also what it has seen."""
        self.updates, counters = state["updates"], dict(state["counters"])
        rise, best = counters.pop("rise", None), counters.pop("best", None)
        vars(self._main).update(counters)
        if best is not None:
            self._main.best = float.fromhex(best)
        if rise is not None and self._rise is not None:
            self._rise.last_epoch, self._rise._step_count = rise

    def _jump(self, updates: int) -> None:
        """To the place of a function."""
        self.updates = updates
        if updates:
            self._main.last_epoch = updates - 1
            self._main._step_count = updates + 1  # not the first: that wants an optimizer step
            self._main.step()
            self._main._step_count = updates + 1

    def _go_through(self, updates: int) -> None:
        """To the place of another schedule than the saved one, update by update."""
        with warnings.catch_warnings(action="ignore"):  # no optimizer steps between
            for _ in range(updates):
                self.step()


def build(
    config: Schedule, optimizer: torch.optim.Optimizer, lengths: Lengths
) -> Scheduler:
    """The scheduler of the configuration; its `step` follows each update."""
    return Scheduler(config, optimizer, lengths)
