"""What may change when a run is resumed, and whether it stays exact."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from trainer.config import command_line
from trainer.config.compatibility import ResumeDecision, compare_settings, settings
from trainer.config.schema import Config
from trainer.errors import ConfigError

HERE: dict[str, Any] = {"task": "images", "data": "9600 samples abc", "world_size": 2, "threads": 1,
                        "device": "cpu", "torch": "2.11.0"}

BASE = ["--steps=10", "--schedule.name=linear"]

CHANGES = {
    "seed": "7", "steps": "20", "epochs": "3", "run": "elsewhere", "device": "cpu",
    "resume": "never", "accept": "data", "inject": "kill", "task.data": "fashion-mnist",
    "task.root": "/there", "task.model": "resnet18", "task.norm": "group", "task.augment": "none",
    "task.label_smoothing": "0.2", "task.dropout": "0.1", "task.validation_fraction": "0.1",
    "task.teacher": "/there", "task.teacher_model": "resnet18", "init": "/there",
    "freeze": "body.*", "optim.rates": "body.*=0.1", "optim.ema": "0.9",
    "schedule.options": "min_ratio=0.2", "task.seed": "3",
    "log.sinks": "mine:Sink", "log.wandb": "offline", "log.hints_off": "all",
    "batch.global_size": "64", "batch.micro_size": "16", "optim.name": "sgd",
    "schedule.name": "constant", "precision.dtype": "bf16", "precision.compile": "off",
    "precision.channels_last": "off", "parallel.sync_bn": "off", "optim.betas": "0.5 0.6",
    "parallel.reduction": "canonical", "checkpoint.on_error": "stop", "data.on_error": "skip",
    "data.order": "keyed", "data.sampler": "mine:Order", "log.level": "debug", "eval.best": "val_loss:min", "nonfinite.spike_z": "3",
    "clip.value": "1"}
"""Another value than in `BASE`, for each setting for which none can be derived."""


@functools.cache
def parsed(*argv: str) -> Config[Any]:
    return command_line.parse_config([*BASE, *argv])


def saved(*argv: str) -> dict[str, Any]:
    """The settings as read from a checkpoint."""
    return json.loads(json.dumps(settings(parsed(*argv))))


def other_value(name: str, value: Any) -> str:
    """Another valid value of the setting."""
    if name in CHANGES:
        return CHANGES[name]
    if value in ("on", "off"):
        return "off" if value == "on" else "on"
    return str(value / 2) if isinstance(value, float) and value else "17"


SETTINGS = [(name, value, change) for name, value, change in parsed().leaves()]


# --- the three classes

@pytest.mark.parametrize(("name", "value", "change"), SETTINGS, ids=lambda v: str(v)[:30])
def test_each_setting_may_change_as_declared(name, value, change):
    flag = f"--{name.replace('_', '-')}"
    now = parsed(flag, *other_value(name, value).split())
    assert settings(now)[name] != settings(parsed())[name], "the test has to change it"

    if change == "must_match":
        with pytest.raises(ConfigError) as caught:
            compare_settings(now, saved(), now=HERE, then=HERE)
        message = str(caught.value)
        assert message.startswith(f"{flag} was {settings(parsed())[name]!r} and is "
                               f"{settings(now)[name]!r}: ")
        assert f"--accept {flag.removeprefix('--')}" in message
        now = parsed(flag, *other_value(name, value).split(), "--accept", flag.removeprefix("--"))
    verdict = compare_settings(now, saved(), now=HERE, then=HERE)
    if change == "ignored":
        assert verdict == ResumeDecision()
    else:
        assert verdict.label == "equivalent"
        assert [line.split()[0] for line in verdict.changes] == [flag]
        assert verdict.why == verdict.changes[0]


def test_accepting_one_change_accepts_no_other():
    with pytest.raises(ConfigError, match=r"--seed was 0 and is 1: .* --accept seed\."):
        compare_settings(parsed("--seed=1", "--batch.micro-size=16", "--accept=batch.micro-size"),
                         saved(), now=HERE, then=HERE)


# --- circumstances

@pytest.mark.parametrize(("key", "value", "line"), [
    ("world_size", 3, "world size was 2 and is 3"),
    ("threads", 4, "threads was 1 and is 4"),
    ("device", "NVIDIA H100", "device was cpu and is NVIDIA H100"),
    ("torch", "2.14.1", "torch was 2.11.0 and is 2.14.1")])
def test_changed_circumstances_are_reported_and_not_exact(key, value, line):
    verdict = compare_settings(parsed(), saved(), now=HERE | {key: value}, then=HERE)

    assert verdict == ResumeDecision(changes=(line,), reasons=(line,))


def test_another_number_of_ranks_is_exact_with_the_canonical_reduction():
    line = "world size was 2 and is 3: the same bits (--parallel.reduction canonical)"
    canonical = "--parallel.reduction=canonical"

    verdict = compare_settings(parsed(canonical), saved(canonical), now=HERE | {"world_size": 3},
                               then=HERE)
    assert verdict == ResumeDecision(changes=(line,))

    changed = compare_settings(parsed(canonical), saved(), now=HERE | {"world_size": 3}, then=HERE)
    assert changed.label == "equivalent"


@pytest.mark.parametrize(("key", "accept"), [("data", "data"), ("task", "task.class")])
def test_other_data_or_another_task_are_refused_unless_accepted(key, accept):
    now = HERE | {key: "another"}

    with pytest.raises(ConfigError) as caught:
        compare_settings(parsed(), saved(), now=now, then=HERE)
    assert f"was {HERE[key]!r} and is 'another'" in str(caught.value)
    assert f"--accept {accept}." in str(caught.value)

    verdict = compare_settings(parsed("--accept", accept), saved(), now=now, then=HERE)
    assert verdict.label == "equivalent"
    assert "and is 'another'" in verdict.why


# --- checkpoints of other versions

def test_a_setting_missing_from_an_older_checkpoint_is_treated_by_its_class():
    then = saved()
    del then["log.every"], then["clip.value"]

    verdict = compare_settings(parsed(), then, now=HERE, then=HERE)

    assert verdict.changes == ("--clip.value was None and is 0.0",)


def test_a_removed_setting_is_ignored_and_a_removed_field_of_the_task_is_not():
    assert compare_settings(parsed(), saved() | {"gone.setting": 1}, now=HERE,
                            then=HERE) == ResumeDecision()
    with pytest.raises(ConfigError, match=r"--task\.gone was 1 and is None"):
        compare_settings(parsed(), saved() | {"task.gone": 1}, now=HERE, then=HERE)
