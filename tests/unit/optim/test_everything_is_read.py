"""Each setting of an optimizer, a schedule or a loss is used, or refused by name."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from trainer.checkpoint.progress import ScheduleLengths
from trainer.config.fields import Duration
from trainer.config.schema import SCHEDULES, Clip, Config, Eval, Optim, Precision, Schedule
from trainer.errors import ConfigError
from trainer.optim import optimizers, schedules
from trainer.task import first_batch
from trainer.tasks import losses
from trainer.tasks.images import Images
from trainer.tasks.photos import Photos
from trainer.tasks.shapes import Shapes

USABLE = [name for name, cls in vars(torch.optim).items()
          if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
          and name not in ("Optimizer", "LBFGS")]
OPTIMIZERS = ["adamw", "sgd", *(f"torch.optim:{name}" for name in USABLE)]
FLAGS: dict[str, Any] = {"weight_decay": 0.25, "betas": (0.5, 0.625), "eps": 0.125,
                         "momentum": 0.25, "nesterov": "on"}
SPECIAL = {"ns_coefficients": "3,-4,2", "adjust_lr_fn": "match_rms_adamw", "ns_steps": "3",
           "betas": "0.25,0.5", "beta2_decay": "-0.5", "d": "2"}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3, bias=False)  # Muon takes matrices only


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    cls: Any = optimizers.SHIPPED.get(name) or getattr(torch.optim, name.partition(":")[2])
    return dict(inspect.signature(cls).parameters)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_flag_reaches_each_optimizer_or_is_refused(name, flag):
    takes, value = flag in parameters_of(name), FLAGS[flag]
    if name == "torch.optim:Adafactor" and flag == "eps":
        with pytest.raises(ConfigError, match="calling it with"):  # its eps is a pair
            optimizers.make_optimizer(Optim(name=name, eps=value), net())
    elif takes:
        more = {"momentum": 0.25} if flag == "nesterov" else {}
        made = optimizers.make_optimizer(Optim(name=name, **({flag: value} | more)), net())
        assert made.param_groups[0][flag] == (True if value == "on" else value)
    else:
        with pytest.raises(ConfigError) as error:
            optimizers.make_optimizer(Optim(name=name, **{flag: value}), net())
        assert re.match(rf"--optim.{flag.replace('_', '-')} .*: {name} doesn't read it; omit it",
                        str(error.value))


OPTIONS = [(name, key) for name in OPTIMIZERS for key in parameters_of(name)
           if key not in ("params", "lr", "fused", "foreach")]


@pytest.mark.parametrize(("name", "key"), OPTIONS)
def test_each_argument_of_each_optimizer_can_be_set_by_an_option(name, key):
    default = parameters_of(name)[key].default
    text = SPECIAL.get(key) or (str(not default).lower() if isinstance(default, bool) else
                                "0.25,1.5" if isinstance(default, tuple) else "0.25")
    more = ("momentum=0.25",) if key == "nesterov" and name != "sgd" else ()
    config = Optim(name=name, options=(f"{key}={text}", *more))
    if getattr(config, key, None) is not None:  # a flag of a shipped optimizer
        message = rf"{key}=.*: use --optim.{key.replace('_', '-')}"
    elif name in optimizers.SHIPPED and key == "differentiable":
        message = "does not support `differentiable`"  # torch's fused kernels
    else:
        made = optimizers.make_optimizer(config, net())
        expected = text if key == "adjust_lr_fn" else ast.literal_eval(text.capitalize())
        assert made.param_groups[0].get(key, made.defaults.get(key)) == expected
        return
    with pytest.raises(ConfigError, match=message):
        optimizers.make_optimizer(config, net())


@pytest.mark.parametrize(("options", "message"), [
    (("centred=true",), "--optim.options centred=true: torch.optim:RMSprop doesn't read it; omit "
     "it. Its options are alpha, centered"),
    (("centered=yes",), "--optim.options centered=yes: expected true or false"),
    (("lr=0.1",), "--optim.options lr=0.1: use --optim.lr"),
    (("alpha=-3",), "Invalid alpha value: -3")])
def test_an_option_that_cannot_be_used_is_refused(options, message):
    with pytest.raises(ConfigError) as error:
        optimizers.make_optimizer(Optim(name="torch.optim:RMSprop", options=options), net())
    assert message in str(error.value)


class Keeps(torch.optim.SGD):
    def __init__(self, groups, lr, **rest):
        super().__init__(groups, lr, **rest)


class Drops(torch.optim.SGD):
    def __init__(self, groups, lr, **rest):
        super().__init__(groups, lr)


def test_an_argument_that_disappears_in_keywords_is_refused():
    config = Optim(name=f"{__name__}:Keeps", momentum=0.5, options=("dampening=0.25",))
    assert optimizers.make_optimizer(config, net()).defaults["dampening"] == 0.25
    with pytest.raises(ConfigError, match=r"--optim.options alpha=1: .*:Drops doesn't read it"):
        optimizers.make_optimizer(Optim(name=f"{__name__}:Drops", options=("alpha=1",)), net())


@pytest.mark.parametrize(("config", "flag"), [
    (Optim(lr=0.5), "--optim.lr 0.5"), (Optim(weight_decay=0.5), "--optim.weight-decay 0.5"),
    (Optim(betas=(0.5, 0.75)), "--optim.betas 0.5 0.75"),
    (Optim(options=("amsgrad=true",)), "--optim.options amsgrad=true")])
def test_a_flag_that_all_groups_of_the_task_override_is_refused(config, flag):
    own = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.5, 0.5), "amsgrad": False}

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters()), **own}]

    with pytest.raises(ConfigError) as error:
        optimizers.make_optimizer(config, net(), groups)
    assert str(error.value).startswith(f"{flag}: each group of the task's parameter_groups()")
    optimizers.make_optimizer(Optim(), net(), groups)


# --- schedules

def rates(config: Schedule) -> list[list[float]]:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0, momentum=0.5)
    schedule = schedules.Scheduler(config, optimizer, ScheduleLengths(epoch=8, total=40))
    found = []
    for update in range(40):
        found.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
        optimizer.step()
        schedule.step()
        schedule.validated({"val_loss": 2.0 - update / 80, "val_accuracy": update})
    return found


def rates_unless_refused(name: str, options: tuple[str, ...], key: str) -> list[list[float]] | None:
    """The rates; None if a message about the key refuses the options."""
    with contextlib.suppress(ConfigError):
        return rates(Schedule(name=name, warmup=Duration(4), options=options))
    with pytest.raises(ConfigError, match=key):
        rates(Schedule(name=name, warmup=Duration(4), options=options))
    return None


OF_SCHEDULES = {
    "T_max": "3", "eta_min": "0.05", "T_0": "3", "T_mult": "2", "start_factor": "0.5",
    "end_factor": "0.5", "total_iters": "7", "milestones": "20", "gamma": "0.5", "max_lr": "3",
    "total_steps": "20", "epochs": "2", "steps_per_epoch": "3", "pct_start": "0.5",
    "anneal_strategy": "linear", "cycle_momentum": "false", "base_momentum": "0.5",
    "max_momentum": "0.75", "div_factor": "5", "final_div_factor": "5", "three_phase": "true",
    "mode": "max", "factor": "0.5", "patience": "2", "threshold": "0.5", "threshold_mode": "abs",
    "cooldown": "2", "min_lr": "0.5", "eps": "0.5", "metric": "val_accuracy:max", "last_epoch": "3",
    "optimizer": "1"}
WITH = {"multi-step": ("milestones=9",),
        "plateau": ("patience=1", "threshold=0.015", "factor=0.75")}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_option_of_a_schedule_changes_the_rates_or_is_refused(name):
    keys = {*OF_SCHEDULES, *inspect.signature(schedules.CLASSES.get(name, object)).parameters}
    base = WITH.get(name, ())
    straight = rates(Schedule(name=name, warmup=Duration(4), options=base))
    for key in sorted(keys - {"kwargs", "args"}):
        text = f"{key}={OF_SCHEDULES[key]}"
        assert rates_unless_refused(name, (*base, text), key) != straight, key
    assert rates(Schedule(name=name, warmup=Duration(9), options=base)) != straight


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ratio_changes_the_rates_or_is_refused(name):
    base = WITH.get(name, ())
    if name not in ("cosine", "linear"):
        with pytest.raises(ConfigError, match=r"--schedule.min-ratio 0.1: "):  # also the default
            Schedule(name=name, min_ratio=0.1, options=base)
        return
    assert rates(Schedule(name=name, min_ratio=0.5)) != rates(Schedule(name=name))


@pytest.mark.parametrize(("name", "options", "message"), [
    ("one-cycle", ("cycle_momentum=false", "max_momentum=0.9"), "max_momentum would have"),
    ("one-cycle", ("epochs=3", "steps_per_epoch=9"), "epochs|steps_per_epoch would")])
def test_an_option_that_another_one_switches_off_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        rates(Schedule(name=name, options=options))
    with pytest.raises(ConfigError, match=r"--schedule.min-ratio 0.5: "):
        Schedule(name="linear", min_ratio=0.5, options=("end_factor=0.2",))


# --- losses

INPUTS: dict[str, tuple[Any, ...]] = {
    "cross-entropy": (torch.randn(4, 3), torch.tensor([0, 1, 2, 1])),
    "bce": (torch.randn(4, 3), torch.ones(4, 3)), "mse": (torch.randn(4, 3), torch.randn(4, 3)),
    "huber": (3 * torch.randn(4, 3), torch.zeros(4, 3)),
    "margin-ranking": (torch.randn(9), torch.randn(9), torch.ones(9)),
    "kl": (torch.randn(4, 3), torch.randn(4, 3)),
    "dice+bce": (torch.randn(2, 3, 4, 4), torch.ones(2, 3, 4, 4))}
OF_LOSSES: dict[str, Any] = {
    "weight": (0.5, 1.0, 2.0), "label_smoothing": 0.25, "ignore_index": 1,
    "pos_weight": (0.5, 1.0, 2.0), "delta": 0.25, "margin": 0.5, "temperature": 2.0, "smooth": 3.0,
    "dice": 0.25}


@pytest.mark.parametrize("name", losses.LOSSES)
def test_each_option_changes_the_loss_or_is_refused(name):
    def value(**options: Any) -> float:
        total, count = losses.named(name, **options)(*INPUTS[name])
        return float(total) / float(count)

    known = {f.name for f in dataclasses.fields(losses.LOSSES[name]) if f.init}
    assert known <= OF_LOSSES.keys()
    for option, given in OF_LOSSES.items():
        if option in known:
            assert value(**{option: given}) != value(), option
        else:
            with pytest.raises(ConfigError, match=f"loss '.*: .*'{option}'; its options are "):
                value(**{option: given})


def test_a_class_to_ignore_is_refused_for_targets_that_are_probabilities():
    with first_batch(), pytest.raises(ConfigError, match="ignore_index has no effect"):
        losses.named("cross-entropy", ignore_index=7)(torch.randn(4, 3), torch.full((4, 3), 1 / 3))


# --- other pairs of settings

@pytest.mark.parametrize(("make", "flag"), [
    (lambda: Config(steps=9, epochs=2), "--steps 9"),
    (lambda: Clip(norm=2.0, value=0.5), "--clip.norm 2.0"),
    (lambda: Precision(loss_scale=8.0), "--precision.loss-scale 8.0"),
    (lambda: Eval(min_delta=0.5), "--eval.min-delta 0.5"),
    (lambda: Images(temperature=2.0), "--task.temperature 2.0"),
    (lambda: Images(teacher_share=0.25), "--task.teacher-share 0.25"),
    (lambda: Images(teacher_architecture="resnet18"), "--task.teacher-model resnet18"),
    (lambda: Images(root="/there"), "--task.root /there"),
    (lambda: Shapes(target="labels", loss_name="dice+bce"), "--task.loss dice+bce"),
    (lambda: Photos(data="cifar-10", crop=32), "--task.crop 32")])
def test_a_setting_that_another_one_switches_off_is_refused(make, flag):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(f"{flag}: ")
