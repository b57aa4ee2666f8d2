"""Compare a configuration with a checkpoint's: which changes a resumed run may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import SEVERAL, flag_of
from trainer.config.schema import Config, without_unread
from trainer.errors import ConfigError, listed
from trainer.storage.secrets import masked

_CHOOSERS = ("optim", "schedule")
"""Sections whose `name` decides which of their settings are read."""
VALUES = ("world_size", "threads", "device", "cpu", "torch", "numpy", "python", "cudnn")
"""Circumstances with a single value; "cpu" is its vector instructions."""
DATA = "data"
"""The name of the data fingerprint for `--accept`."""


@dataclass(frozen=True, kw_only=True)
class ResumeDecision:
    """How a run may be resumed from a checkpoint: one line for each reported or accepted change,
    and the reasons why the run is only equivalent."""

    changes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return "equivalent" if self.reasons else "exact"

    @property
    def why(self) -> str:
        """The reasons in one line; "" if exact."""
        return "; ".join(self.reasons)


def settings(config: Config[Any]) -> dict[str, Any]:
    """All settings by dotted name, as JSON values, secret ones masked; checkpoints store them."""
    return {name: masked(name, _plain(value)) for name, value, _ in config.leaves()}


def _plain(value: Any) -> Any:
    if isinstance(value, SEVERAL):  # the order of a set may be another one in each process
        ordered = value if isinstance(value, tuple | list) else sorted(value, key=repr)
        return [_plain(item) for item in ordered]
    keep = value is None or isinstance(value, bool | int | float | str)
    return value if keep else str(masked("", value))


def compare_settings(
    config: Config[Any], saved: Mapping[str, Any], *, now: Mapping[str, Any],
    then: Mapping[str, Any], before: Sequence[str] = (),
) -> ResumeDecision:  # fmt: skip
    """Compare configuration and circumstances of this attempt with those of a checkpoint.

    Args:
        saved: `settings` of the attempt that wrote the checkpoint.
        now, then: circumstances of this attempt and of that one: "data" (fingerprint of the
            training data), "splits" (those of the others), "task" (path), "code" (hashes of files),
            "packages" (versions), "gpu" (see `circumstances`) and `VALUES`. Those that older
            checkpoints lack are not compared.
        before: reasons of earlier attempts why the run is only equivalent; they stay.

    Raises:
        ConfigError: a setting that must match has changed; names both values and `--accept`.
    """
    changes, refused = list[str](), dict[str, str]()

    def must_be_accepted(name: str, what: str, old: object, new: object) -> None:
        text = f"{what} was {old!r} and is {new!r}"
        accepted = {key.replace("-", "_") for key in config.accept}
        if name in accepted:
            changes.append(text)
        else:
            refused[name] = text

    if now.get("task") != then.get("task"):  # first, since its fields then differ too
        must_be_accepted("task.class", "the task", then.get("task"), now.get("task"))
    for name, change, old, new in _changed_settings(config, saved):
        if change == "fixed":
            raise ConfigError(
                f"{flag_of(name)} was {old!r} and is {new!r}: the run has its weights already. "
                "Give the earlier value, or use another --run-dir for a new run.")
        if change == "must_match":
            must_be_accepted(name, flag_of(name), old, new)
        elif change == "may_change":
            changes.append(f"{flag_of(name)} was {old!r} and is {new!r}")
    for split, old, new in _changed_data(now, then):
        must_be_accepted(DATA, f"the fingerprint of the {split} data", old, new)
        if split.startswith("validation") and not refused:
            changes[-1] += "; best weights and patience begin anew"
    _refuse(refused)
    reasons = [*before, *changes]
    canonical = "canonical" == config.parallel.reduction == saved.get("parallel.reduction")
    for key, text in _changed_values(now, then):
        if key == "world_size" and canonical:
            changes.append(f"{text}: the same bits (--parallel.reduction canonical)")
        else:
            changes.append(text)
            reasons.append(text)
    before_now = then.get("code", {})
    if files := [name for name, code in now.get("code", {}).items()
                 if before_now.get(name, code) != code]:
        changes.append(", ".join(files))
        reasons.append(f"changed: {listed(files)}")
    return ResumeDecision(changes=tuple(changes), reasons=tuple(dict.fromkeys(reasons)))


def _changed_settings(
    config: Config[Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Name, class of change, old and new value of each setting with another value."""
    classes: dict[str, str] = {name: change for name, _, change in config.leaves()}
    current, saved = settings(config), _comparable(config, saved)
    for name in {**saved, **current}:
        old, new, section = saved.get(name), current.get(name), name.partition(".")[0]
        if section in _CHOOSERS and None in (old, new) and (
                saved.get(f"{section}.name") != current[f"{section}.name"]):
            continue  # the other optimizer or schedule doesn't read it
        if old != new:
            default = "must_match" if name.startswith("task.") else "ignored"
            yield name, classes.get(name, default), old, new


def _changed_data(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Name, old and new fingerprint of each split whose data have changed."""
    here, there = ({"training": facts.get(DATA), **facts.get("splits", {})}
                   for facts in (now, then))
    for split in here:
        if split in there and here[split] != there[split]:
            yield split, there[split], here[split]


def _changed_values(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Name and line of each circumstance with another value."""
    for name in VALUES:
        if name in then and now.get(name) != then[name]:
            yield name, f"{name.replace('_', ' ')} was {then[name]} and is {now.get(name)}"
    for group in ("packages", "gpu"):
        here, there = now.get(group, {}), then.get(group, {})
        for name in here:
            if here[name] != there.get(name, here[name]):
                verbs = ("were", "are") if name.startswith("the ") else ("was", "is")
                yield name, f"{name} {verbs[0]} {there[name]} and {verbs[1]} {here[name]}"


def _comparable(config: Config[Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings: None for what the run didn't read, and the default for what the version that
    saved them didn't have."""
    defaults = {}
    if any(name not in saved for name, _, _ in config.leaves()):
        defaults = {name: value for name, value in settings(Config(task=config.task)).items()
                    if not name.startswith("task.")}
    return defaults | dict.fromkeys(saved) | without_unread(masked("", saved))


def _refuse(refused: Mapping[str, str]) -> None:
    """Refuse changes, given by their names, that --accept allows."""
    if not refused:
        return
    cause = ("If you changed nothing, the data depend on something that no seed determines: random "
             "numbers drawn before the run (call torch.manual_seed(0) before them), the order of a "
             "set or a folder (sort it), hash() of a string (set PYTHONHASHSEED), the clock. "
             if refused.keys() == {DATA} else "")
    flags = " ".join(f"--accept {name.replace('_', '-')}" for name in refused)
    raise ConfigError(
        f"{'; '.join(refused.values())}: this would be a different run, so it is not continued. "
        f"{cause}Use another --run-dir for a new run, or continue anyway with {flags}.")
