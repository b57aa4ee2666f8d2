"""What a resumed run may change: refused, announced, or free; and whether it stays exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.length import Length

DATA = "data"
"""The key under which a changed data fingerprint is refused and accepted."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a start goes on from a checkpoint.

    Attributes:
        changes: one line for each announced or accepted change.
        label: "exact" or "equivalent".
        reasons: what makes it merely equivalent.
    """

    changes: tuple[str, ...] = ()
    label: str = "exact"
    reasons: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons in one line; "" where exact."""
        return "; ".join(self.reasons)


def settings(config: Config[Any]) -> dict[str, Any]:
    """Each configuration leaf by dotted name, as JSON: what a checkpoint remembers."""
    plain = {}
    for name, value, _ in config.leaves():
        if isinstance(value, tuple):
            value = list(value)
        keep = value is None or isinstance(value, bool | int | float | str | list)
        plain[name] = value if keep and not isinstance(value, Length) else str(value)
    return plain


def judge(
    config: Config[Any], saved: Mapping[str, Any], *, now: Mapping[str, Any],
    then: Mapping[str, Any], before: Sequence[str] = (),
) -> Verdict:  # fmt: skip
    """Compare a start's configuration and circumstances with those of the checkpoint.

    Args:
        saved: `settings` of the attempt that wrote the checkpoint.
        now, then: circumstances: "data" (fingerprint), "task" (path), "world_size", "threads",
            "device", "cpu" (its vector instructions), "torch", "numpy".
        before: what earlier starts have changed that bits depend on: it stays so.

    Raises:
        ConfigError: a refused key has changed; names both values and the override.
    """
    accepted = {name.replace("-", "_") for name in config.accept}
    classes = {name: change for name, _, change in config.leaves()}
    current = settings(config)
    lines, reasons = [], list(before)
    if now.get("task") != then.get("task"):  # first: its fields differ for that
        text = f"the task was {then.get('task')!r} and is {now.get('task')!r}"
        _refuse("task.class", text, accepted)
        lines.append(text)
        reasons.append(text)
    for name in _differing(current, saved):
        change = classes.get(name, "refused" if name.startswith("task.") else "free")
        text = f"{_flag(name)} was {saved.get(name)!r} and is {current.get(name)!r}"
        if change == "refused":
            _refuse(name, text, accepted)
        if change != "free":
            lines.append(text)
            reasons.append(text)
    if now.get(DATA) != then.get(DATA):
        text = f"the data's fingerprint was {then.get(DATA)!r} and is {now.get(DATA)!r}"
        _refuse(DATA, text, accepted, "Where nothing was changed, something decides them that no "
                "seed does: the order of a set or of a folder (sort it), hash() of a text (set "
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
    return Verdict(changes=tuple(lines), label=label, reasons=tuple(reasons))


def _differing(current: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterable[str]:
    return [n for n in {**saved, **current} if current.get(n) != saved.get(n)]


def _refuse(name: str, text: str, accepted: set[str], cause: str = "") -> None:
    if name not in accepted:
        raise ConfigError(
            f"{text}: with it this run would be another one, so it isn't continued. {cause}Use "
            "another --run for a new one, or go on all the same with "
            f"--accept {name.replace('_', '-')}."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
