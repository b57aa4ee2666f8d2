"""What is wrong with a command line, in one line that names the flag."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import ConfigError

_UNREADABLE = re.compile(
    r"Error parsing (--\S+): (.*) Argument helptext: --\S+ "
    r"((?:(?:INT|FLOAT|STR|PATH|LENGTH|\{[^}]*\})[| ]?)+) ?(.*?)(?: \(default: [^()]*\))?$")
"""tyro's words about a value that isn't of its flag's type: flag, reason, type, help."""
_USUAL = {
    "accumulate-grad-batches": "batch.micro-size", "amp": "precision.dtype",
    "batch-size": "batch.global-size", "bf16": "precision.dtype", "compile": "precision.compile",
    "ema-decay": "optim.ema", "fp16": "precision.dtype", "grad-clip": "clip.norm",
    "gradient-accumulation-steps": "batch.micro-size", "learning-rate": "optim.lr",
    "log-dir": "run", "max-epochs": "epochs", "max-grad-norm": "clip.norm", "max-steps": "steps",
    "num-epochs": "epochs", "num-workers": "data.workers", "optimizer": "optim.name",
    "output-dir": "run", "save-every": "checkpoint.every", "scheduler": "schedule.name",
    "threads": "world.threads", "warmup-steps": "schedule.warmup", "wd": "optim.weight-decay",
}
"""What other trainers call a flag → what it is here."""
_VALUE = re.compile(r"(?:no type matching .*? from|invalid literal.*?:|could not convert.*?:|"
                    r"Could not parse arguments) (\[.*?\]|'[^']*')")


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a flag has an empty value, as from a shell's unset variable. A field
    of a task may be an empty text."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag = before if argument == "" else argument.removesuffix("=")
        if flag.startswith("--") and "=" not in flag and not flag.startswith("--task.") and (
                argument in ("", f"{flag}=")):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave the flag out.")


def unknown_flag(arguments: Sequence[str], keys: Mapping[str, Any]) -> str | None:
    """What is wrong with the first flag that doesn't exist, or has a value that it can't have
    (tyro suggests next to nothing).

    Args:
        keys: those that there are, and their values so far.
    """
    named = {f"--{name.replace('_', '-')}": value for name, value in keys.items()}
    known = list(named)
    switches = {re.sub(r"^(--(?:.*\.)?)", r"\1no-", flag): flag for flag in known
                if isinstance(named[flag], bool)}
    for argument, after in zip(arguments, [*arguments[1:], "--"], strict=True):
        flag, given, value = argument.partition("=")
        flag = flag.replace("_", "-")
        value = value if given else "" if after.startswith("-") else after
        plain = switches.get(flag, flag)
        if isinstance(now := named.get(plain), bool):
            switch = {f: s for s, f in switches.items()}[plain] if now else plain
            if value or flag != switch:
                return (f"{flag} {value}".rstrip() + f": it is {now} unless {switch} is given, a "
                        "switch that takes no value.")
        if flag.startswith("--") and flag not in (*known, *switches):
            last = flag.rpartition(".")[2].removeprefix("--")
            alike = [name for name in known if re.split(r"\.|--", name)[-1] == last]
            if last in _USUAL:
                alike = [f"--{_USUAL[last]}"]
            near = alike if len(alike) == 1 else difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them all."
            return f"{flag}: there is no such flag; {hint}"
    return _stray(arguments, named)


def _stray(arguments: Sequence[str], values: Mapping[str, Any]) -> str | None:
    """What is wrong with the first word that no flag takes."""
    flag, may_follow = "", 0.0
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0].replace("_", "-")
            many = isinstance(values.get(flag), tuple | list)
            may_follow = 0.0 if "=" in argument else math.inf if many else 1.0
        elif may_follow:
            may_follow -= 1
        else:
            return (f"{argument}: no flag takes it" + (f"; {flag} has its value already" if flag
                                                       else "") +
                    ". Put quotes around a value that has spaces, and -- before a flag's name.")
    return None


def plain(text: str) -> str:
    """tyro's boxed error as one line: what is wrong and what is near it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.sub(r"[─│╭╮╰╯├┤]+", " ", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip("- ") and "full helptext" not in line]
    told = " ".join(lines[1:] if len(lines) > 1 else lines)  # the first is the box's title
    told = re.sub(r"\s+", " ", told.removesuffix(" trainer --help")).strip()
    if found := _UNREADABLE.match(told):
        flag, why, kind, about = found.groups()
        if value := _VALUE.match(why):
            wanted = re.sub(r"[{}]", "", kind).strip().replace("|", " or ").replace(",", ", ")
            words = re.sub(r"^\[|\]$|,", "", value[1])
            return f"{flag} {words}: {wanted} is wanted. {about}"
        return f"{flag}: {why}. {about}"
    return re.sub(r"^Error parsing [\w.]+: (?=--|task\.)", "", told)
