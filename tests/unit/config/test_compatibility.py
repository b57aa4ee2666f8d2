"""What may change when a run is resumed, and whether it stays exact."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.config import command_line
from trainer.config.compatibility import ResumeDecision, compare_settings, settings
from trainer.config.schema import Config
from trainer.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs/resume.md").read_text()
HERE: dict[str, Any] = {"task": "images", "data": "9600 samples abc", "world_size": 2, "threads": 1,
                        "device": "cpu", "torch": "2.11.0", "python": "3.12",
                        "splits": {"validation": "40 samples ab", "test": None},
                        "packages": {"timm": "1.0"}, "code": {"mine.py": "a", "ops.py": "a"},
                        "gpu": {"NCCL": "2.27.3", "the variables of NCCL": "none"}}

BASE = ["--steps=10", "--schedule.name=linear"]
NEEDS = {
    "overfit": ["--overfit", "9"],
    "checkpoint.mirror_every": ["--checkpoint.mirror=s3://bucket/run"],
    "optim.momentum": ["--optim.name=sgd"], "optim.nesterov": ["--optim.name=sgd"],
    "schedule.options": ["--schedule.name=cosine-annealing"],
    "freeze_until": ["--freeze=body.*"], "eval.min_delta": ["--eval.patience=3"],
    "precision.loss_scale": ["--precision.dtype=fp16"],
    "task.root": ["--task.data=fashion-mnist"],
    "task.teacher_model": ["--task.teacher=/there"],
    "task.teacher_share": ["--task.teacher=/there"],
    "task.temperature": ["--task.teacher=/there"]}
"""Settings that are only read together with others."""

CHANGES = {
    "seed": "7", "steps": "20", "epochs": "3", "run": "elsewhere", "device": "cpu",
    "optim.nesterov": "on", "optim.momentum": "0.5", "optim.eps": "0.5",
    "data.stream_resume": "state",
    "resume": "never", "accept": "data", "inject": "kill", "task.data": "fashion-mnist",
    "task.root": "/there", "task.model": "resnet18", "task.norm": "group", "task.augment": "none",
    "task.label_smoothing": "0.2", "task.dropout": "0.1", "task.validation_fraction": "0.1",
    "task.teacher": "/there", "task.teacher_model": "resnet18", "init": "/there",
    "checkpoint.mirror": "s3://bucket/run",
    "freeze": "body.*", "optim.rates": "body.*=0.1", "optim.ema": "0.9",
    "schedule.options": "eta_min=0.2", "optim.options": "amsgrad=true", "task.seed": "3",
    "log.sinks": "mine:Sink", "log.wandb": "offline", "log.hints_off": "all",
    "batch.global_size": "64", "batch.micro_size": "16", "optim.name": "sgd",
    "schedule.name": "constant", "precision.dtype": "bf16", "precision.compile": "off",
    "precision.channels_last": "off", "parallel.sync_bn": "off", "optim.betas": "0.5 0.6",
    "parallel.reduction": "canonical", "checkpoint.on_error": "stop", "data.on_error": "skip",
    "data.order": "keyed", "data.sampler": "mine:Order", "log.level": "debug",
    "eval.best": "val_loss:min", "nonfinite.spike_z": "3",
    "clip.value": "1"}
"""Another value than in `BASE`, for each setting for which none can be derived."""


@functools.cache
def parsed(*argv: str) -> Config[Any]:
    base = BASE[1:] if {"--epochs", "--overfit"} & {*argv} else BASE
    return command_line.parse_config([*base, *argv])


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

def test_the_page_has_each_setting_in_its_class():
    documented = {
        match[1].replace(" ", "_"): {
            key.strip() for key in match[2].split(",") if "field" not in key}
        for match in re.finditer(r"^\| (fixed|must match|may change|ignored) \| (.*) \|$", PAGE,
                                 re.MULTILINE)}

    actual: dict[str, set[str]] = {}
    for name, _, change in SETTINGS:
        if not name.startswith("task."):
            actual.setdefault(change, set()).add(name)

    assert documented == actual


@pytest.mark.parametrize(("name", "value", "change"), SETTINGS, ids=lambda v: str(v)[:30])
def test_each_setting_may_change_as_declared(name, value, change):
    flag, needs = f"--{name.replace('_', '-')}", NEEDS.get(name, [])
    before, argv = saved(*needs), [*needs, flag, *other_value(name, value).split()]
    now = parsed(*argv)
    assert settings(now)[name] != before[name], "the test has to change it"

    if change in ("fixed", "must_match"):
        with pytest.raises(ConfigError) as caught:
            compare_settings(now, before, now=HERE, then=HERE)
        message = str(caught.value)
        assert message.startswith(f"{flag} was {before[name]!r} and is {settings(now)[name]!r}: ")
        accept = f"--accept {flag.removeprefix('--')}"
        assert (accept in message) == (change == "must_match")
        if change == "fixed":
            with pytest.raises(ConfigError, match=r"--accept .*: there is no such setting"):
                parsed(*argv, *accept.split())
            return
        now = parsed(*argv, *accept.split())
    verdict = compare_settings(now, before, now=HERE, then=HERE)
    if change == "ignored":
        assert verdict == ResumeDecision()
    else:
        assert verdict.label == "equivalent"
        others = {"epochs": ["--steps"], "overfit": ["--steps"],
                  "clip.value": ["--clip.norm"]}.get(name, [])
        assert {line.split()[0] for line in verdict.changes} == {flag, *others}
        assert verdict.why == "; ".join(verdict.changes)


def test_accepting_one_change_accepts_no_other():
    with pytest.raises(ConfigError, match=r"--seed was 0 and is 1: .* --accept seed\."):
        compare_settings(parsed("--seed=1", "--batch.micro-size=16", "--accept=batch.micro-size"),
                         saved(), now=HERE, then=HERE)


def test_all_refused_changes_are_named_at_once_with_all_flags_that_accept_them():
    now = parsed("--seed=1", "--batch.micro-size=16")
    with pytest.raises(ConfigError, match=(
            r"--seed was .*; --batch.micro-size was .*; the fingerprint of the training data was "
            r".*--accept seed --accept batch.micro-size --accept data")):
        compare_settings(now, saved(), now=HERE | {"data": "another"}, then=HERE)


# --- circumstances

@pytest.mark.parametrize(("key", "value", "line"), [
    ("world_size", 3, "world size was 2 and is 3"),
    ("threads", 4, "threads was 1 and is 4"),
    ("device", "NVIDIA H100", "device was cpu and is NVIDIA H100"),
    ("torch", "2.14.1", "torch was 2.11.0 and is 2.14.1"),
    ("python", "3.13", "python was 3.12 and is 3.13"),
    ("packages", {"timm": "1.1", "added": "1"}, "timm was 1.0 and is 1.1"),
    ("gpu", {"NCCL": "2.30.7", "added": "1"}, "NCCL was 2.27.3 and is 2.30.7"),
    ("gpu", {"the variables of NCCL": "NCCL_ALGO=Tree"},
     "the variables of NCCL were none and are NCCL_ALGO=Tree"),
    ("code", {"mine.py": "b", "ops.py": "b", "added.py": "b"}, "mine.py, ops.py")])
def test_changed_circumstances_are_reported_and_not_exact(key, value, line):
    verdict = compare_settings(parsed(), saved(), now=HERE | {key: value}, then=HERE)

    assert verdict == ResumeDecision(
        changes=(line,), reasons=(f"changed: {line}" if key == "code" else line,))


def test_circumstances_that_an_older_checkpoint_lacks_are_not_compared():
    then = {name: HERE[name] for name in ("task", "data", "world_size", "threads", "torch")}
    assert compare_settings(parsed(), saved(), now=HERE, then=then) == ResumeDecision()


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


@pytest.mark.parametrize(("split", "value"), [("validation", "40 samples cd"), ("test", "1 cd")])
def test_every_split_of_the_data_must_be_accepted(split, value):
    now = HERE | {"splits": HERE["splits"] | {split: value}}

    with pytest.raises(ConfigError, match=rf"of the {split} data was .* and is '{value}'"):
        compare_settings(parsed(), saved(), now=now, then=HERE)

    why = compare_settings(parsed("--accept", "data"), saved(), now=now, then=HERE).why
    assert ("begin anew" in why) is (split == "validation")


# --- checkpoints of other versions

def test_a_setting_missing_from_an_older_checkpoint_had_its_default():
    then = saved()
    del then["log.every"], then["clip.value"], then["schedule.replan"]

    assert compare_settings(parsed(), then, now=HERE, then=HERE) == ResumeDecision()
    verdict = compare_settings(parsed("--schedule.replan=on"), then, now=HERE, then=HERE)
    assert verdict.changes == ("--schedule.replan was 'off' and is 'on'",)


@pytest.mark.parametrize(("argv", "then"), [
    ([], {"epochs": 5, "optim.momentum": 0.9, "optim.nesterov": "off"}),
    (["--optim.name=sgd"], {"optim.betas": [0.9, 0.999], "optim.eps": 1e-8}),
    (["--optim.name=m:C", "--schedule.name=constant", "--clip.value=0.5"],
     {"optim.weight_decay": 0.01, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
      "optim.momentum": 0.9, "optim.nesterov": "off", "schedule.min_ratio": 0.1,
      "clip.norm": 5.0})])
def test_what_an_earlier_version_recorded_and_did_not_read_is_no_change(argv, then):
    before = saved(*argv) | then
    del before["optim.options"], before["schedule.replan"]

    assert compare_settings(parsed(*argv), before, now=HERE, then=HERE) == ResumeDecision()


def test_a_removed_setting_is_ignored_and_a_removed_field_of_the_task_is_not():
    assert compare_settings(parsed(), saved() | {"gone.setting": 1}, now=HERE,
                            then=HERE) == ResumeDecision()
    with pytest.raises(ConfigError, match=r"--task\.gone was 1 and is None"):
        compare_settings(parsed(), saved() | {"task.gone": 1}, now=HERE, then=HERE)
