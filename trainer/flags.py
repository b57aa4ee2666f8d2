"""What is wrong with a command line, in one line that names the flag."""

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
_MISSING = re.compile(r"Missing value for argument '(--[^']+)'\. Expected (\d+) values?\.")
_VALUE = re.compile(r"(?:no type matching .*? from|invalid literal.*?:|could not convert.*?:|"
                    r"Could not parse arguments|Could not find valid parse for arguments:) "
                    r"(\[.*?\]|'[^']*')")
_MANY = (list, set, frozenset, dict, collections.abc.Sequence, collections.abc.Mapping)
"""Types that hold as many values as are given; a tuple[X, ...] does too."""


def spelt(arguments: Sequence[str]) -> list[str]:
    """The arguments as the parser knows them."""
    # torchrun takes --run for its own --run-path, abbreviated (and, with Python 3.11, ambiguous).
    known = [re.sub(r"^--run-dir(?==|$)", "--run", argument) for argument in arguments]
    # Short for a level of the log, and no key of its own.
    return ["--log.level=warning" if a == "--quiet" else a for a in known]


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """What a command's own parser takes, and the rest, which are flags of a training.

    Raises:
        ConfigError: one of these is rather a misspelt flag of the command.
    """
    options, rest = parser.parse_known_args(argv)
    own = [flag for action in parser._actions for flag in action.option_strings]
    for argument in rest:
        flag = argument.partition("=")[0]
        if "." not in flag and (near := difflib.get_close_matches(flag, own, n=1, cutoff=0.8)):
            raise ConfigError(f"{flag}: there is no such flag; did you mean {near[0]}?")
    return options, rest


def many(cls: Any, prefix: str) -> Iterator[str]:
    """The flags of a task's fields that take any number of values."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        flag = f"--{prefix}{field.name.replace('_', '-')}"
        of = hints[field.name]
        for hint in (of, *typing.get_args(of)):  # of X | None too
            if dataclasses.is_dataclass(hint):
                yield from many(hint, flag[2:] + ".")
            elif typing.get_origin(hint) in _MANY or (
                    typing.get_origin(hint) is tuple and Ellipsis in typing.get_args(hint)):
                yield flag
                break


def kind(hint: Any) -> str:
    """A type in words."""
    of = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(kind, of))
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, of))
    name = getattr(hint, "__name__", str(hint))
    return {"tuple": "list", "NoneType": "None"}.get(name, name)


def gathered(arguments: Sequence[str], flags: Iterable[str]) -> list[str]:
    """The arguments with the values of these flags together, where one of them is given twice or
    more: the parser would take the last ones alone."""
    wanted = set(flags)
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    into, times = rest, dict[str, int]()
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if argument.startswith("--"):
            into = values.setdefault(flag, []) if flag in wanted else rest
        if argument.startswith("--") and flag in wanted:
            times[flag] = times.get(flag, 0) + 1
            into += [value] if equals else []
        else:
            into.append(argument)
    if not any(count > 1 for count in times.values()):
        return list(arguments)
    return rest + [word for flag, words in values.items() for word in (flag, *words)]


def refuse_empty(arguments: Sequence[str]) -> None:
    """Raises: ConfigError: a flag has an empty value, as from a shell's unset variable. A field
    of a task may be an empty text."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag = before if argument == "" else argument.removesuffix("=")
        if flag.startswith("--") and "=" not in flag and not flag.startswith("--task.") and (
                argument in ("", f"{flag}=")):
            raise ConfigError(f"{flag} '': the value is empty; give one, or leave the flag out.")


def unknown_flag(arguments: Sequence[str], names: Iterable[str]) -> str | None:
    """What is wrong with the first flag that doesn't exist (tyro suggests next to nothing).

    Args:
        names: of the keys that there are.
    """
    known = [f"--{name.replace('_', '-')}" for name in names]
    switches = [re.sub(r"^(--(?:.*\.)?)", r"\1no-", flag) for flag in known]  # of boolean fields
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in (*known, *switches):
            last = flag.rpartition(".")[2].removeprefix("--")
            alike = [name for name in known if re.split(r"\.|--", name)[-1] == last]
            if last in _USUAL:
                alike = [f"--{_USUAL[last]}"]
            near = alike if len(alike) == 1 else difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them all."
            return f"{flag}: there is no such flag; {hint}"
    return None


def told(text: str, arguments: Sequence[str], leaves: Sequence[tuple[str, Any]]) -> str:
    """What is wrong with the command line, in one line.

    Args:
        text: what tyro says of it.
        leaves: the keys that there are, and their values.
    """
    words = plain(text)
    if words.startswith("Unrecognized options"):
        return unknown_flag(arguments, (name for name, _ in leaves)) or (
            _stray(arguments, words.removeprefix("Unrecognized options:").strip(), leaves) or words)
    if found := _MISSING.match(words):
        flag, number = found[1], int(found[2])
        given = next((typed for name, *typed in _by_flag(arguments) if name == flag), [])
        return (f"{' '.join([flag, *given])}: " + (
            f"{number} values are wanted, with blanks between them." if number > 1 else
            f"a value is wanted; one that begins with - is written {flag}=-…"))
    return words


def _by_flag(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with the values after it; before the first flag it is an empty text."""
    part = [""]
    for argument in arguments:
        if argument.startswith("--"):
            yield part
            flag, equals, value = argument.partition("=")
            part = [flag.replace("_", "-")] + [value] * bool(equals)
        else:
            part.append(argument)
    yield part


def _stray(arguments: Sequence[str], odd: str, leaves: Sequence[tuple[str, Any]]) -> str:
    """What is wrong with a value that belongs to no flag; empty where it isn't found.

    Args:
        odd: begins with that value.
    """
    kinds = {f"--{name.replace('_', '-')}": value for name, value in leaves}
    for flag, *values in _by_flag(arguments):
        for value in values:
            if odd != value and not odd.startswith((f"{value},", f"{value} ")):
                continue
            on = re.sub(r"^(--(?:.*\.)?)no-", r"\1", flag) if flag not in kinds else flag
            kind = kinds.get(on)
            typed = " ".join([flag, *values])
            if re.match(r"-[^\d.]", value):
                return (f"{value}: there is no such flag; --help lists them all. (A value that "
                        f"begins with - is written {flag or '--flag'}={value}.)")
            if not flag:
                return f"{value}: it belongs to no flag; there is one RECIPE, before all flags."
            if isinstance(kind, bool):
                off = re.sub(r"^(--(?:.*\.)?)", r"\1no-", on)
                return f"{typed}: it is a switch and takes no value; write {on} or {off}."
            if isinstance(kind, tuple) and kind and not isinstance(kind[0], str):
                return f"{typed}: it takes {len(kind)} values."
            remedy = (f"give {flag} once for each, and quote a pattern, which the shell would turn "
                      "into names of files" if isinstance(kind, tuple)
                      else "quote one that has blanks in it")
            return f"{typed}: {value!r} is a value too many; {remedy}."
    return ""


def _as_typed(words: str) -> str:
    """Python's text of a value or a list of them, as it stood on the command line."""
    with contextlib.suppress(ValueError, SyntaxError):
        typed = ast.literal_eval(words)
        return " ".join(map(repr, typed if isinstance(typed, list) else [typed]))
    return words


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
            kind, *several = kind.strip("[ ").split(" [")
            wanted = re.sub(r"[{}]", "", kind).strip().replace("|", " or ").replace(",", ", ")
            wanted += ", or several with blanks between them," if several else ""
            return f"{flag} {_as_typed(value[1])}: {wanted} is wanted. {about}"
        if "key-value pairs" in why:
            return (f"{flag}: keys and values in turns are wanted, with blanks between them: "
                    f"{flag} KEY VALUE. {about}")
        return f"{flag}: {why}. {about}"
    told = re.sub(r"^Error parsing [\w.]+: (?=--|task\.)", "", told)
    return re.sub(r"^Error parsing (task[\w.]*): ", r"--\1: ", told)  # its __post_init__ says so
