"""Learning-rate schedules of torch, stepped once per update (`plateau`: once per validation)."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from trainer.config.fields import Duration
from trainer.config.schema import MIN_RATIO, Config, Schedule
from trainer.errors import CheckpointDamaged, ConfigError, listed
from trainer.optim.named_optimizers import NamedOptimizers
from trainer.task import load_object

if TYPE_CHECKING:
    from trainer.checkpoint.progress import ScheduleLengths

CLASSES: dict[str, type] = {
    "cosine-annealing": lr_scheduler.CosineAnnealingLR,
    "one-cycle": lr_scheduler.OneCycleLR,
    "warm-restarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "linear": lr_scheduler.LinearLR,
    "multi-step": lr_scheduler.MultiStepLR,
    "plateau": lr_scheduler.ReduceLROnPlateau,
}
"""Name → class. All other schedules are functions of the update's number."""

LENGTHS = ("T_max", "T_0", "total_iters", "total_steps", "milestones")
INTEGERS = ("T_mult", "patience", "cooldown")
MOVED = ("lr", "betas", "momentum")
"""Entries of a parameter group that a schedule may change (of a tuple, the first number)."""
COUNTERS = ("last_epoch", "_step_count", "T_cur", "T_i", "num_bad_epochs", "cooldown_counter")


def factor(config: Schedule, update: int, *, epoch: int, total: int) -> float:
    """Learning rate of an update (from 0) as a fraction of the peak, for `cosine` and `constant`.

    The warm-up rises linearly from 1 / steps (an update with rate 0 would have no effect) and
    reaches the peak at its last step. The cosine reaches `min_ratio` at the run's last update and
    stays there. `epoch` and `total` are the optimizer steps of an epoch and of the run.
    """
    warmup = min(config.warmup.steps(epoch=epoch, total=total), total)
    if update < warmup:
        return (update + 1) / warmup
    if config.name == "constant":
        return 1.0
    done, low = min(1.0, (update + 1 - warmup) / max(1, total - warmup)), config.min_ratio or 0.0
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


def _unread(name: str, given: Mapping[str, Any]) -> set[str]:
    """Arguments of torch's class that the others switch off."""
    unread = {"last_epoch"}  # the position is restored in another way
    if name == "one-cycle":
        unread |= {"epochs", "steps_per_epoch"}  # total_steps is always given
        if given.get("cycle_momentum") is False:
            unread |= {"base_momentum", "max_momentum"}
    return unread


class Scheduler:
    """The configured schedule, preceded by a warm-up. Call `step` after each update.

    A schedule given by a function covers all updates of the run. One of torch's classes starts
    with the last update of the warm-up, a `LinearLR` that ends at the class's initial rate.
    (SequentialLR gives the same rates, but does not support ReduceLROnPlateau.)

    Args:
        optimizer: its groups have the peak rate.
        lengths: may change before `load_state_dict`, which builds the schedule again.
    """

    def __init__(self, config: Schedule, optimizer: torch.optim.Optimizer,
                 lengths: ScheduleLengths) -> None:
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
            group.update(peak, initial_lr=peak["lr"])
        self.updates, self._first = 0, 0
        self._main: Any = None
        self._warmup: lr_scheduler.LinearLR | None = None
        epoch, total = self._lengths.epoch, self._lengths.total
        warmup = max(1, min(self._config.warmup.steps(epoch=epoch, total=total), total))
        if self._config.name not in CLASSES:
            self._factor = self._make_factor(warmup)
            self._jump(0)
            return
        self._first = warmup - 1
        self._main = self._make(CLASSES[self._config.name])
        self._starts = [group["lr"] for group in groups]
        if self._first:
            self._warmup = lr_scheduler.LinearLR(
                self._optimizer, start_factor=1 / warmup, total_iters=self._first)

    def _make_factor(self, warmup: int) -> Callable[[int], float]:
        """The function from the number of an update to its factor, warm-up included."""
        config, lengths = self._config, self._lengths
        if ":" not in config.name:
            return lambda update: factor(config, update, epoch=lengths.epoch, total=lengths.total)
        function, first = load_object(config.name, flag="--schedule.name"), warmup - 1

        def checked(update: int) -> float:
            try:
                value = float(function(max(update, first)))
            except Exception as error:
                raise ConfigError(f"--schedule.name {config.name}: called with the number of an "
                                  f"update, it raised {type(error).__name__}: {error}.") from error
            if not 0 <= value < math.inf:
                raise ConfigError(f"--schedule.name {config.name}: for update {update} it returned "
                                  f"{value}; it must return a factor of --optim.lr, 0 or more.")
            return value if update >= first else value * (update + 1) / warmup

        return checked

    def _make(self, cls: type) -> Any:
        """Create one of torch's classes; the length of the run gives the options not set."""
        name, left = self._config.name, max(1, self._lengths.total - 1 - self._first)
        end = self._config.min_ratio
        defaults: dict[str, dict[str, Any]] = {
            "cosine-annealing": {"T_max": left},
            "one-cycle": {"max_lr": [peak["lr"] for peak in self._peaks], "total_steps": left + 1},
            "warm-restarts": {"T_0": self._lengths.epoch},
            "linear": {"start_factor": 1.0, "end_factor": end, "total_iters": left},
        }
        try:
            given = {key: self._parsed(key, text) for key, text in self._config.arguments.items()
                     if key != "metric" or not self.metric}
            if name == "multi-step":  # milestones are positions in the run, warm-up included
                given["milestones"] = [m - self._first for m in given.get("milestones", [0])]
                if min(given["milestones"]) <= 0:
                    raise ValueError("it needs milestones after the warm-up, such as "
                                     "milestones=30ep,60ep")
            for key in _unread(name, given) & given.keys():
                raise ValueError(f"{key} would have no effect: omit it")
            mode = [self._direction] if self.metric else []
            return cls(self._optimizer, *mode, **{**defaults.get(name, {}), **given})
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"--schedule.name {name} with --schedule.options "
                              f"{' '.join(self._config.options) or 'empty'}: {error}.") from error

    def _parsed(self, key: str, text: str) -> Any:
        """Parse an option to the type that torch's class expects."""
        if key in LENGTHS:
            epoch, total = self._lengths.epoch, self._lengths.total
            steps = [Duration.parse(part).steps(epoch=epoch, total=total)
                     for part in text.split(",")]
            return steps if key == "milestones" else steps[0]
        if key in INTEGERS:
            return int(text)
        if text in ("true", "false"):
            return text == "true"
        try:
            return float(text)
        except ValueError:
            return text

    def step(self) -> None:
        """Set the rates of the next update, after an update."""
        self.updates += 1
        if self._main is None:
            self._jump(self.updates)
        elif self.updates < self._first and self._warmup is not None:
            self._warmup.step()
        elif self._warmup is not None and self.updates == self._first:
            for group, start in zip(self._optimizer.param_groups, self._starts, strict=True):
                group["lr"] = start
        elif not (self.metric or self._is_at_its_end()):
            self._main.step()

    def _jump(self, updates: int) -> None:
        """Set the rates of an update from the function."""
        self.updates, value = updates, self._factor(updates)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak["lr"] * value

    def end(self, total: int) -> tuple[int, float] | None:
        """The number of updates after which the rate of the first group stays as it is in a run of
        `total` updates, and this rate; None if it has no end. Of a function only an end at 0."""
        name, lengths, peak = self._config.name, self._lengths, self._peaks[0]["lr"]
        if name == "cosine":
            return lengths.total, peak * self._factor(lengths.total - 1)
        if name == "linear":
            return self._first + self._main.total_iters + 1, peak * self._main.end_factor
        if name == "one-cycle":
            return (self._first + self._main.total_steps,
                    self._optimizer.param_groups[0]["min_lr"])
        if name == "cosine-annealing":
            share = (lengths.total - 1 - self._first) / self._main.T_max
            low = self._main.eta_min
            return lengths.total, low + (peak - low) * (1 + math.cos(math.pi * share)) / 2
        if ":" in name and self._factor(total - 1) == 0:
            zeros = itertools.takewhile(lambda n: self._factor(n) == 0, range(total - 1, -1, -1))
            return 1 + min(zeros), 0.0
        return None

    def _is_at_its_end(self) -> bool:
        """Whether the rate stays constant from here on, so as not to rise again in a longer run."""
        if self._config.name == "one-cycle":
            return self._main.last_epoch >= self._main.total_steps - 1
        return self._config.name == "cosine-annealing" and self.updates >= self._lengths.total

    def check_metric(self, figures: Sequence[str]) -> None:
        """Refuse a metric of `plateau` that the validation does not compute."""
        if self.metric and self.metric not in figures:
            raise ConfigError(f"--schedule.options metric={self.metric}: the validation does not "
                              f"compute this metric; it computes {', '.join(figures)}.")

    def validated(self, line: Mapping[str, Any]) -> None:
        """Step `plateau` after a validation (`line` of metrics.jsonl), once the warm-up is over."""
        if self.metric and self.updates >= self._first:
            value = line[self.metric]
            self._main.step(math.nan if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        """State without the rates, which are part of the optimizer's state."""
        counters: dict[str, Any] = (
            {"last_epoch": self.updates, "_step_count": self.updates + 1} if self._main is None
            else {k: v for k, v in self._main.state_dict().items() if k in COUNTERS})
        if self.metric:
            counters["best"] = float(self._main.best).hex()  # infinite before the first validation
        if self._warmup is not None:
            rise = self._warmup.state_dict()
            counters["rise"] = [rise["last_epoch"], rise["_step_count"]]
        return {"updates": self.updates, "of": self._description(), "counters": counters}

    def _description(self) -> list[Any]:
        config, lengths = self._config, self._lengths
        ratio = MIN_RATIO if config.min_ratio is None else config.min_ratio
        return [config.name, str(config.warmup), ratio, *config.options, lengths.epoch,
                lengths.total]

    def load_state_dict(self, state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state and set the rates: those of the saved parameter groups if the
        configuration is unchanged, otherwise those that follow from the new one."""
        self._build()
        live = self._optimizer.param_groups
        same = state["of"] == self._description() and all(
            saved.get("initial_lr") == group["initial_lr"]
            and all((key in saved) == (key in group) for key in MOVED)  # the same optimizer
            for saved, group in zip(groups, live, strict=True))
        if self._main is None:
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
            with warnings.catch_warnings(action="ignore"):  # torch misses the optimizer's steps
                for _ in range(state["updates"]):
                    self.step()
            if self.metric and state["of"][0] == "plateau":
                self._restore_counters(state)
                shares = [g["lr"] / g["initial_lr"] for g in groups if g]
                for saved, group in zip(groups, live, strict=True):
                    share = saved["lr"] / saved["initial_lr"] if saved else shares[0]
                    group["lr"] = share * group["initial_lr"]

    def _restore_counters(self, state: Mapping[str, Any]) -> None:
        """Set the positions of the schedulers, and the best value of `plateau`."""
        self.updates, counters = state["updates"], dict(state["counters"])
        rise = counters.pop("rise", None)
        if "best" in counters:
            counters["best"] = float.fromhex(counters["best"])
        self._main.load_state_dict(counters)
        if rise is not None and self._warmup is not None:
            self._warmup.load_state_dict({"last_epoch": rise[0], "_step_count": rise[1]})


class Schedules:
    """The schedules of several optimizers, each that of the run or its own; see `Scheduler`. Their
    positions are those of the run: every update moves them, whichever optimizer it is for."""

    def __init__(self, config: Schedule, optimizer: NamedOptimizers,
                 lengths: ScheduleLengths) -> None:
        self._named = {name: Scheduler(member.schedule or config, member.optimizer, lengths)
                       for name, member in optimizer.members.items()}
        self._sizes = [len(m.optimizer.param_groups) for m in optimizer.members.values()]

    @property
    def metric(self) -> str:
        return next((s.metric for s in self._named.values() if s.metric), "")

    def step(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # torch misses steps of the other turns
            for schedule in self._named.values():
                schedule.step()

    def check_metric(self, figures: Sequence[str]) -> None:
        for schedule in self._named.values():
            schedule.check_metric(figures)

    def validated(self, line: Mapping[str, Any]) -> None:
        for schedule in self._named.values():
            schedule.validated(line)

    def state_dict(self) -> dict[str, Any]:
        return {"named": {name: s.state_dict() for name, s in self._named.items()}}

    def load_state_dict(self, state: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore them. Raises CheckpointDamaged if the optimizers have other names."""
        saved = state.get("named", {})
        if saved.keys() != self._named.keys():
            raise CheckpointDamaged(f"it has schedules for {listed(saved) or 'one optimizer'}, and "
                                    f"the task has the optimizers {listed(self._named)}")
        remaining = iter(groups)
        for (name, schedule), size in zip(self._named.items(), self._sizes, strict=True):
            schedule.load_state_dict(saved[name], list(itertools.islice(remaining, size)))


def make_schedule(config: Schedule, optimizer: torch.optim.Optimizer,
                  lengths: ScheduleLengths) -> Scheduler | Schedules:
    kind: Any = Schedules if isinstance(optimizer, NamedOptimizers) else Scheduler
    return kind(config, optimizer, lengths)


def describe_end(config: Config[Any], lengths: ScheduleLengths, total: int) -> tuple[int, str]:
    """The step with which the schedule ends, and a warning; (0, "") if it is the last one."""
    likeness = torch.optim.SGD([torch.zeros(1)], lr=config.optim.lr, momentum=0.9)
    end = Scheduler(config.schedule, likeness, lengths).end(total)
    if end is None or end[0] == total:
        return 0, ""
    (step, rate), name = end, f"--schedule.name {config.schedule.name}"
    remedy = (f"--schedule.replan on plans it over {total} steps" if lengths.total != total else
              "change --schedule.options, the function, or the length of the run")
    if step > total:
        return step, (f"{name} is planned over {step} steps and the run ends after {total}, before "
                      f"the rate has come to its end; {remedy}")
    changes = "keep this rate" if rate else "change no weights"
    return step, (f"{name} reaches its last rate, {rate:g}, with step {step}: the other "
                  f"{total - step} of {total} steps {changes}; {remedy}")
