"""Command line flags: aliases, and error messages in one line that name the flag."""

from __future__ import annotations

import argparse
import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainer.errors import ConfigError

_UNREADABLE = re.compile(
    r"Error parsing (--\S+): (.*) Argument helptext: --\S+ "
    r"(\[?(?:(?:INT|FLOAT|STR|PATH|LENGTH|\{[^}]*\})[| ]?)+(?:\[.*?\.\.\.\]\])?) ?"
    r"(.*?)(?: \(default: [^()]*\))?$")
"""tyro's message about a value of the wrong type: flag, reason, type, help text."""
FLAG_NAMES = {"run": "run-dir"}
"""Setting → name of its flag, where they differ."""
_USUAL = {
    "accumulate-grad-batches": "batch.micro-size", "amp": "precision.dtype",
    "batch-size": "batch.global-size", "bf16": "precision.dtype", "compile": "precision.compile",
    "ema-decay": "optim.ema", "fp16": "precision.dtype", "grad-clip": "clip.norm",
    "gradient-accumulation-steps": "batch.micro-size", "learning-rate": "optim.lr",
    "log-dir": "run-dir", "max-epochs": "epochs", "max-grad-norm": "clip.norm",
    "max-steps": "steps",
    "num-epochs": "epochs", "num-workers": "data.workers", "optimizer": "optim.name",
    "output-dir": "run-dir", "save-every": "checkpoint.every", "scheduler": "schedule.name",
    "threads": "world.threads", "warmup-steps": "schedule.warmup", "wd": "optim.weight-decay",
}
"""Flag name in other trainers → name here."""
_MISSING = re.compile(r"Missing value for argument '(--[^']+)'\. Expected (\d+) values?\.")
_VALUE = re.compile(r"(?:no type matching .*? from|invalid literal.*?:|could not convert.*?:|"
                    r"Could not parse arguments|Could not find valid parse for arguments:) "
                    r"(\[.*?\]|'[^']*')")
_MANY = (list, set, frozenset, dict, collections.abc.Sequence, collections.abc.Mapping)
"""Types of any number of values, besides tuple[X, ...]."""


def without_aliases(arguments: Sequence[str]) -> list[str]:
    """Replace the aliases `--run` (for `--run-dir`) and `--quiet` (for `--log.level=warning`)."""
    arguments = [re.sub(r"^--run(?==|$)", "--run-dir", argument) for argument in arguments]
    return ["--log.level=warning" if a == "--quiet" else a for a in arguments]


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split arguments into a command's own options and the rest, which are training flags.

    Raises:
        ConfigError: one of the rest is probably a misspelt flag of the command.
    """
    options, rest = parser.parse_known_args(argv)
    own = [flag for action in parser._actions for flag in action.option_strings]
    for argument in rest:
        flag = argument.partition("=")[0]
        if "." not in flag and (near := difflib.get_close_matches(flag, own, n=1, cutoff=0.8)):
            raise ConfigError(f"{flag}: there is no such flag; did you mean {near[0]}?")
    return options, rest


def multi_value_flags(cls: Any, prefix: str) -> Iterator[str]:
    """Flags of a task's fields that take any number of values."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = f"--{prefix}{field.name.replace('_', '-')}"
        of = hints[field.name]
        for hint in (of, *typing.get_args(of)):  # also for X | None
            if dataclasses.is_dataclass(hint):
                yield from multi_value_flags(hint, flag[2:] + ".")
            elif typing.get_origin(hint) in _MANY or (
                    typing.get_origin(hint) is tuple and Ellipsis in typing.get_args(hint)):
                yield flag
                break


def type_name(hint: Any) -> str:
    """A type in words, for messages."""
    of = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, of))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, of))
    name = getattr(hint, "__name__", str(hint))
    return {"tuple": "list", "NoneType": "None"}.get(name, name)


def join_repeated(arguments: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Join the values of repeated flags: the parser would only take the last ones.

    Args:
        flags: flags that take any number of values.
    """
    joined = set(flags)
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    into, times = rest, dict[str, int]()
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if argument.startswith("--"):
            into = values.setdefault(flag, []) if flag in joined else rest
        if argument.startswith("--") and flag in joined:
            times[flag] = times.get(flag, 0) + 1
            into += [value] if equals else []
        else:
            into.append(argument)
    if not any(count > 1 for count in times.values()):
        return list(arguments)
    return rest + [word for flag, words in values.items() for word in (flag, *words)]


def check_not_empty(arguments: Sequence[str]) -> None:
    """Check that no flag has an empty value, as from an unset variable of the shell.

    A task's field may be an empty string.

    Raises:
        ConfigError: a value is empty.
    """
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag = before if argument == "" else argument.removesuffix("=")
        if flag.startswith("--") and "=" not in flag and not flag.startswith("--task.") and (
                argument in ("", f"{flag}=")):
            raise ConfigError(f"{flag} '': the value is empty; give one, or omit the flag.")


def unknown_flag(arguments: Sequence[str], names: Iterable[str]) -> str | None:
    """The message for the first unknown flag, with a suggestion; None if all flags are known.

    Args:
        names: names of all settings.
    """
    known = [f"--{name.replace('_', '-')}" for name in names]
    switches = [re.sub(r"^(--(?:.*\.)?)", r"\1no-", flag) for flag in known]  # for boolean fields
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in (*known, *switches):
            last = flag.rpartition(".")[2].removeprefix("--")
            same = [name for name in known if re.split(r"\.|--", name)[-1] == last]
            if last in _USUAL:
                same = [f"--{_USUAL[last]}"]
            near = same if len(same) == 1 else difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them all."
            return f"{flag}: there is no such flag; {hint}"
    return None


def error_message(
    text: str, arguments: Sequence[str], settings: Sequence[tuple[str, Any]]
) -> str:
    """The error in a command line, in one line.

    Args:
        text: tyro's error message.
        settings: (name, value) of all settings.
    """
    words = plain(text)
    if words.startswith("Unrecognized options"):
        excess = words.removeprefix("Unrecognized options:").strip()
        return unknown_flag(arguments, (name for name, _ in settings)) or (
            _excess_value(arguments, excess, settings) or words)
    if found := _MISSING.match(words):
        flag, number = found[1], int(found[2])
        given = next((typed for name, *typed in _by_flag(arguments) if name == flag), [])
        return (f"{' '.join([flag, *given])}: " + (
            f"expected {number} values, separated by blanks." if number > 1 else
            f"expected a value; write one that begins with - as {flag}=-…"))
    return words


def _by_flag(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values; the values before the first flag come with an empty flag."""
    part = [""]
    for argument in arguments:
        if argument.startswith("--"):
            yield part
            flag, equals, value = argument.partition("=")
            part = [flag.replace("_", "-")] + [value] * bool(equals)
        else:
            part.append(argument)
    yield part


def _excess_value(
    arguments: Sequence[str], excess: str, settings: Sequence[tuple[str, Any]]
) -> str:
    """The message for a value that belongs to no flag; "" if it isn't found.

    Args:
        excess: text that begins with the value.
    """
    current = {f"--{name.replace('_', '-')}": value for name, value in settings}
    for flag, *values in _by_flag(arguments):
        for value in values:
            if excess != value and not excess.startswith((f"{value},", f"{value} ")):
                continue
            on = re.sub(r"^(--(?:.*\.)?)no-", r"\1", flag) if flag not in current else flag
            default = current.get(on)
            typed = " ".join([flag, *values])
            if re.match(r"-[^\d.]", value):
                return (f"{value}: there is no such flag; --help lists them all. (Write a value "
                        f"that begins with - as {flag or '--flag'}={value}.)")
            if not flag:
                return f"{value}: it belongs to no flag; give one RECIPE, before all flags."
            if isinstance(default, bool):
                off = re.sub(r"^(--(?:.*\.)?)", r"\1no-", on)
                return f"{typed}: it is a switch and takes no value; write {on} or {off}."
            if isinstance(default, tuple) and default and not isinstance(default[0], str):
                return f"{typed}: it takes {len(default)} values."
            remedy = (f"repeat {flag} for each value, and quote a pattern, which the shell would "
                      "expand to file names" if isinstance(default, tuple)
                      else "quote a value that contains blanks")
            return f"{typed}: {value!r} is an excess value; {remedy}."
    return ""


def _as_typed(words: str) -> str:
    """Convert Python's repr of a value or list to the form on the command line."""
    with contextlib.suppress(ValueError, SyntaxError):
        typed = ast.literal_eval(words)
        return " ".join(map(repr, typed if isinstance(typed, list) else [typed]))
    return words


def plain(text: str) -> str:
    """tyro's boxed error message as one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [re.sub(r"[─│╭╮╰╯├┤]+", " ", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip("- ") and "full helptext" not in line]
    message = " ".join(lines[1:] if len(lines) > 1 else lines)  # the first is the box's title
    message = re.sub(r"\s+", " ", message.removesuffix(" trainer --help")).strip()
    if found := _UNREADABLE.match(message):
        flag, why, kind, about = found.groups()
        if value := _VALUE.match(why):
            kind, *several = kind.strip("[ ").split(" [")
            expected = re.sub(r"[{}]", "", kind).strip().replace("|", " or ").replace(",", ", ")
            expected += ", or several separated by blanks" if several else ""
            return f"{flag} {_as_typed(value[1])}: expected {expected}. {about}"
        if "key-value pairs" in why:
            return (f"{flag}: expected alternating keys and values, separated by blanks: "
                    f"{flag} KEY VALUE. {about}")
        return f"{flag}: {why}. {about}"
    message = re.sub(r"^Error parsing [\w.]+: (?=--|task\.)", "", message)
    return re.sub(r"^Error parsing (task[\w.]*): ", r"--\1: ", message)  # from its __post_init__
