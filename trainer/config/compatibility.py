"""Compare a configuration with a checkpoint's: which changes a resumed run may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import SEVERAL, flag_of
from trainer.config.schema import Config
from trainer.errors import ConfigError, listed

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
    """All settings by dotted name, as JSON values; checkpoints store them."""
    return {name: _plain(value) for name, value, _ in config.leaves()}


def _plain(value: Any) -> Any:
    if isinstance(value, SEVERAL):  # the order of a set may be another one in each process
        ordered = value if isinstance(value, tuple | list) else sorted(value, key=repr)
        return [_plain(item) for item in ordered]
    keep = value is None or isinstance(value, bool | int | float | str)
    return value if keep else str(value)


def compare_settings(
    config: Config[Any], saved: Mapping[str, Any], *, now: Mapping[str, Any],
    then: Mapping[str, Any], before: Sequence[str] = (),
) -> ResumeDecision:  # fmt: skip
    """Compare configuration and circumstances of this attempt with those of a checkpoint.

    Args:
        saved: `settings` of the attempt that wrote the checkpoint.
        now, then: circumstances of this attempt and of that one: "data" (fingerprint of the
            training data), "splits" (those of the others), "task" (path), "code" (hashes of files),
            "packages" (versions) and `VALUES`. Those that older checkpoints lack are not compared.
        before: reasons of earlier attempts why the run is only equivalent; they stay.

    Raises:
        ConfigError: a setting that must match has changed; names both values and `--accept`.
    """
    classes = {name: change for name, _, change in config.leaves()}
    current = settings(config)
    changes: list[str] = []
    if now.get("task") != then.get("task"):  # first, since its fields then differ too
        changes.append(_accepted(config, "task.class", "the task", then.get("task"),
                                 now.get("task")))
    for name in {**saved, **current}:
        old, new = saved.get(name), current.get(name)
        change = classes.get(name, "must_match" if name.startswith("task.") else "ignored")
        if old != new and change == "must_match":
            changes.append(_accepted(config, name, flag_of(name), old, new))
        elif old != new and change == "may_change":
            changes.append(f"{flag_of(name)} was {old!r} and is {new!r}")
    changes += _changed_data(config, now=now, then=then)
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


def _changed_data(
    config: Config[Any], *, now: Mapping[str, Any], then: Mapping[str, Any]
) -> Iterator[str]:
    """Lines of the splits whose data have changed, which `--accept` must allow."""
    here, there = ({"training": facts.get(DATA), **facts.get("splits", {})}
                   for facts in (now, then))
    for split in here:
        if split in there and here[split] != there[split]:
            what = f"the fingerprint of the {split} data"
            anew = "; best weights and patience begin anew" * (split == "validation")
            yield _accepted(
                config, DATA, what, there[split], here[split], "If you changed nothing, the data "
                "depend on something that no seed determines: the order of a set or a folder (sort "
                "it), hash() of a string (set PYTHONHASHSEED), the clock. ") + anew


def _changed_values(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Name and line of each circumstance with another value."""
    for name in VALUES:
        if name in then and now.get(name) != then[name]:
            yield name, f"{name.replace('_', ' ')} was {then[name]} and is {now.get(name)}"
    here, there = now.get("packages", {}), then.get("packages", {})
    for name in here:
        if here[name] != there.get(name, here[name]):
            yield name, f"{name} was {there[name]} and is {here[name]}"


def _accepted(
    config: Config[Any], name: str, what: str, then: object, now: object, cause: str = ""
) -> str:
    """The line of a change that `--accept` must allow."""
    text = f"{what} was {then!r} and is {now!r}"
    if name not in {accepted.replace("-", "_") for accepted in config.accept}:
        raise ConfigError(
            f"{text}: this would be a different run, so it is not continued. {cause}Use another "
            f"--run-dir for a new run, or continue anyway with --accept {name.replace('_', '-')}.")
    return text
