"""Compare a configuration with a checkpoint's: which changes a resumed run may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.fields import Duration, flag_of
from trainer.config.schema import Config
from trainer.errors import ConfigError

DATA = "data"
"""The name of the data fingerprint for `--accept`."""


@dataclass(frozen=True, kw_only=True)
class ResumeDecision:
    """How a run may be resumed from a checkpoint.

    Attributes:
        changes: one line for each reported or accepted change.
        label: "exact" or "equivalent".
        reasons: why the run is only equivalent.
    """

    changes: tuple[str, ...] = ()
    label: str = "exact"
    reasons: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons in one line; "" if exact."""
        return "; ".join(self.reasons)


def settings(config: Config[Any]) -> dict[str, Any]:
    """All settings by dotted name, as JSON values; checkpoints store them."""
    plain = {}
    for name, value, _ in config.leaves():
        if isinstance(value, tuple):
            value = list(value)
        keep = value is None or isinstance(value, bool | int | float | str | list)
        plain[name] = value if keep and not isinstance(value, Duration) else str(value)
    return plain


def compare_settings(
    config: Config[Any], saved: Mapping[str, Any], *, now: Mapping[str, Any],
    then: Mapping[str, Any], before: Sequence[str] = (),
) -> ResumeDecision:  # fmt: skip
    """Compare configuration and circumstances of this attempt with those of a checkpoint.

    Args:
        saved: `settings` of the attempt that wrote the checkpoint.
        now, then: circumstances of this attempt and of that one: "data" (fingerprint), "task"
            (path), "world_size", "threads", "device", "cpu" (vector instructions), "torch",
            "numpy".
        before: reasons of earlier attempts why the run is only equivalent; they stay.

    Raises:
        ConfigError: a setting that must match has changed; names both values and `--accept`.
    """
    accepted = {name.replace("-", "_") for name in config.accept}
    classes = {name: change for name, _, change in config.leaves()}
    current = settings(config)
    lines, reasons = [], list(before)
    if now.get("task") != then.get("task"):  # first, since its fields then differ too
        text = f"the task was {then.get('task')!r} and is {now.get('task')!r}"
        _check_accepted("task.class", text, accepted)
        lines.append(text)
        reasons.append(text)
    for name in [n for n in {**saved, **current} if current.get(n) != saved.get(n)]:
        change = classes.get(name, "must_match" if name.startswith("task.") else "ignored")
        text = f"{flag_of(name)} was {saved.get(name)!r} and is {current.get(name)!r}"
        if change == "must_match":
            _check_accepted(name, text, accepted)
        if change != "ignored":
            lines.append(text)
            reasons.append(text)
    if now.get(DATA) != then.get(DATA):
        text = f"the data's fingerprint was {then.get(DATA)!r} and is {now.get(DATA)!r}"
        _check_accepted(
            DATA, text, accepted, "If you changed nothing, the data depend on something that no "
            "seed determines: the order of a set or a folder (sort it), hash() of a string (set "
            "PYTHONHASHSEED), the clock. ")
        lines.append(text)
        reasons.append(text)
    canonical = "canonical" == config.parallel.reduction == saved.get("parallel.reduction")
    for key in ("world_size", "threads", "device", "cpu", "torch", "numpy"):
        if key in then and now.get(key) != then[key]:
            text = f"{key.replace('_', ' ')} was {then.get(key)} and is {now.get(key)}"
            if key == "world_size" and canonical:
                lines.append(f"{text}: the same bits (--parallel.reduction canonical)")
                continue
            lines.append(text)
            reasons.append(text)
    label = "equivalent" if reasons else "exact"
    return ResumeDecision(changes=tuple(lines), label=label, reasons=tuple(reasons))


def _check_accepted(name: str, text: str, accepted: set[str], cause: str = "") -> None:
    if name not in accepted:
        raise ConfigError(
            f"{text}: this would be a different run, so it is not continued. {cause}Use another "
            f"--run-dir for a new run, or continue anyway with --accept {name.replace('_', '-')}."
        )
