"""Parse a recipe (TOML) and flags into a `Config`, and write a `Config` as TOML."""

from __future__ import annotations

import argparse
import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import enum
import io
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tomli_w
import tyro

from trainer.config.fields import Duration
from trainer.config.schema import Config, Schedule
from trainer.errors import ConfigError
from trainer.task import BUILT_IN, RECORDED, find_task, split_task_argument
from trainer.telemetry.std_streams import EXIT_PIPE, quiet_broken_pipe

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


RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "sample"
# Both keys are keywords of Python, so that no field of a task can have their names.
_TASK_KEY = "class"
_NONE_KEY = "None"  # lists the fields that are None, since TOML has no null

_HELP = """\
Fault-tolerant training. RECIPE comes first: a TOML file, or one of: {recipes}
(default: {default}). Flags override the recipe.

  torchrun --standalone --nproc_per_node=2 --max-restarts=3 -m trainer [RECIPE] [flags]
  python -m trainer [RECIPE] [flags]                       one process, no launcher
  python -m trainer COMMAND --help                         {commands}

A LENGTH is 200 (optimizer steps), 1ep (epochs), 5% (of the run) or off.
--task NAME|module:Class selects the task ({tasks}, or your own);
its fields are the flags below --task.

--quiet shows only warnings and errors (--log.level warning).
--run is accepted for --run-dir, except under torchrun, which takes it for its own --run-path.
"""


def parse_config(argv: Sequence[str], *, show: bool = True, commands: str = "") -> Config[Any]:
    """Parse a command line: recipe and flags.

    Args:
        show: whether to print the help text (on one rank only).
        commands: names of the other commands, for the help text and for hints.

    Raises:
        ConfigError: a recipe, key or flag is unknown, or a value is invalid or can't be stored in
            config.toml.
        SystemExit: with code 0, after `--help`.
    """
    arguments = list(argv)
    recipe = arguments.pop(0) if arguments and not arguments[0].startswith("-") else DEFAULT_RECIPE
    task_name, arguments = split_task_argument(without_aliases(arguments))
    check_not_empty(arguments)
    path = find_recipe(recipe, commands.split(", "))
    has_task_flags = any(argument.startswith(("--task.", "--task_")) for argument in arguments)
    default = load(path, task_name=task_name, unchecked=has_task_flags)
    default = _without_schedule_options(default, arguments)
    arguments = join_repeated(
        arguments, multi_value_flags(type(default.task), "task."))
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_length_rule)
    problems = io.StringIO()
    asks_help = any(a in ("-h", "--help") for a in arguments)
    output = quiet_broken_pipe() if asks_help else contextlib.redirect_stderr(problems)
    try:
        with output, contextlib.redirect_stdout(problems if not asks_help else sys.stdout):
            config: Config[Any] = tyro.cli(  # type: ignore[call-overload]
                Config[type(default.task)],  # type: ignore[misc]
                args=arguments,
                default=default,
                prog="trainer",
                description=_HELP.format(
                    recipes=", ".join(recipe_names()), default=DEFAULT_RECIPE,
                    tasks=", ".join(sorted(BUILT_IN)), commands=commands),
                console_outputs=show or not asks_help,
                registry=registry,
            )
    except ConfigError:
        raise
    except SystemExit as end:
        if asks_help and end.code in (None, 0, EXIT_PIPE):
            raise
        known = [(FLAG_NAMES.get(name, name), value) for name, value, _ in default.leaves()]
        raise ConfigError(
            error_message(problems.getvalue(), arguments, known)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{error}") from error
    if config.run is None:
        name = Path(recipe).stem
        if task_name is not None and recipe == DEFAULT_RECIPE:
            name = task_name.rpartition(":")[2].lower()
        config = dataclasses.replace(config, run=f"runs/{name}")
    to_toml(config)  # raises if a value can't be written, before anything has started
    return config


def _without_schedule_options(default: Config[Any], arguments: Sequence[str]) -> Config[Any]:
    """The recipe's configuration, without its schedule's options if the flags select another."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    named = dict(pairwise(words)).get("--schedule.name")
    if named in (None, default.schedule.name):
        return default
    return dataclasses.replace(default, schedule=Schedule(warmup=default.schedule.warmup))


def load(path: Path, *, task_name: str | None = None, unchecked: bool = False) -> Config[Any]:
    """Read a configuration from a TOML file.

    Args:
        task_name: replaces the file's task, together with the file's `[task]` fields.
        unchecked: don't raise if the task's fields are invalid; flags will change them later.

    Raises:
        ConfigError: the file is invalid; names the file and the key.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    task_table = table.pop("task", {})
    if not isinstance(task_table, dict):
        raise ConfigError(f"{path}: task = {task_table!r}: write a table [task], with the task's "
                          f"name as its key {_TASK_KEY}.")
    task_table = dict(task_table)
    named = _value(str, found := task_table.pop(_TASK_KEY, "images"),
                   f"{path}: task.{_TASK_KEY} = {found!r}")
    source = str(path)
    if task_name is not None and task_name != named:
        named, task_table, source = task_name, {}, f"--task {task_name}"
    task = _instance(find_task(named), task_table, source, unchecked=unchecked)
    try:
        return _from_table(Config, table, "", str(path), task=task)
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def to_toml(config: Config[Any]) -> str:
    """The text of `config.toml`: all settings, except those of one attempt.

    Raises:
        ConfigError: a field of the task has a value that TOML can't represent.
    """
    table = _to_table(config)
    for name in ("run", "resume", "inject", "accept"):
        table.pop(name, None)
    table["task"] = {_TASK_KEY: task_path(config.task), **table["task"]}
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    return tomli_w.dumps({**plain, **{k: v for k, v in table.items() if isinstance(v, dict)}})


def task_path(task: Any) -> str:
    """The value of `--task` that selects the task's class."""
    path = f"{type(task).__module__}:{type(task).__qualname__}"
    path = RECORDED.get(path, path)
    names = {p: name for name, p in BUILT_IN.items()}
    return names.get(path, path)


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(p.stem for p in RECIPES.glob("*.toml"))


def find_recipe(recipe: str, commands: Sequence[str] = ()) -> Path:
    """The file of a recipe, given by name or path.

    Args:
        commands: names of commands; the recipe may be a misspelt one.

    Raises:
        ConfigError: there is no such recipe.
    """
    for path in (Path(recipe), RECIPES / f"{recipe}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return path
    near = difflib.get_close_matches(recipe, [*recipe_names(), *commands], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if near and near[0] in commands:
        raise ConfigError(f"{recipe}: there is no such command; {hint}".strip())
    why = ("this is no TOML file" if recipe and Path(recipe).exists() else
           "there is no such file and no shipped recipe of this name")
    raise ConfigError(f"recipe {recipe or repr(recipe)}: {why}; "
                      f"{hint}Shipped: {', '.join(recipe_names())}.")


def _length_rule(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    if info.type is not Duration:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="LENGTH",
        instance_from_str=lambda words: Duration.parse(words[0]),
        is_instance=lambda value: isinstance(value, Duration),
        str_from_instance=lambda value: [str(value)],
    )


def _instance(cls: type, table: dict[str, Any], source: str, *, unchecked: bool) -> Any:
    """Create a task from a table.

    Fields without a default and without a value in the file remain to be set by flags. If
    `unchecked`, an invalid instance is returned without calling its constructor.
    """
    given = _fields_from_table(cls, table, "task.", source)
    required = [
        f.name for f in dataclasses.fields(cls)
        if f.init and f.name not in given and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    try:
        if not required:
            return cls(**given)
    except (TypeError, ValueError) as error:
        if not unchecked:
            where = source if source.startswith("--") else f"{source}: [task]"
            raise ConfigError(f"{where}: {error}") from error
    instance: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in given:
            value = given[field.name]
        elif field.name in required:
            value = tyro.MISSING
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        object.__setattr__(instance, field.name, value)
    return instance


def _from_table(cls: Any, table: dict[str, Any], prefix: str, source: str, **more: Any) -> Any:
    return cls(**_fields_from_table(cls, table, prefix, source), **more)


def _fields_from_table(
    cls: Any, table: dict[str, Any], prefix: str, source: str
) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    fields = {f.metadata.get("flag", f.name): f for f in dataclasses.fields(cls) if f.init}
    given = {}
    empty = _value(list[str], table.get(_NONE_KEY, []), f"{source}: {prefix}{_NONE_KEY}")
    table = {k: v for k, v in table.items() if k != _NONE_KEY} | dict.fromkeys(empty)
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(fields)}."
            raise ConfigError(f"{source}: unknown key {prefix}{key}; {hint}")
        field = fields[name]
        if field.name in given:
            raise ConfigError(f"{source}: {prefix}{key}: the key is given twice, as "
                              f"{name} and {name.replace('_', '-')}; remove one.")
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint is not Duration:
            if not isinstance(value, dict):
                raise ConfigError(f"{source}: {prefix}{key} = {value!r}: write a table "
                                  f"[{prefix}{key}].")
            given[field.name] = _from_table(hint, value, f"{prefix}{name}.", source)
        else:
            given[field.name] = _value(hint, value, f"{source}: {prefix}{key} = {value!r}")
    return given


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert a TOML value to its field's type."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _value(typing.get_args(hint)[0], value, where)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        for choice in typing.get_args(hint):
            with contextlib.suppress(ConfigError):
                return _value(choice, value, where)
    elif origin is Literal:
        if value in typing.get_args(hint):
            return value
        near = difflib.get_close_matches(str(value), map(str, typing.get_args(hint)), n=1)
        did = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"{where}: use one of "
                          f"{', '.join(map(str, typing.get_args(hint)))}{did}.")
    elif hint in (tuple, set, frozenset) and isinstance(value, list):
        return hint(value)
    elif origin in (tuple, list, set, frozenset) and isinstance(value, list):
        of = typing.get_args(hint)
        if origin is tuple and of and of[-1] is not Ellipsis and len(of) != len(value):
            raise ConfigError(f"{where}: expected {len(of)} values.")
        kinds = of if origin is tuple and of and of[-1] is not Ellipsis else [of[0]] * len(value)
        return origin(_value(kind, v, where) for kind, v in zip(kinds, value, strict=True))
    elif hint is Duration and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return Duration.parse(str(value))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}.") from error
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and isinstance(value, hint):
        if not (hint is int and isinstance(value, bool)):
            return value
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum) and value in hint.__members__:
        return hint[value]
    elif origin is dict and isinstance(value, dict):
        return {k: _value(typing.get_args(hint)[1], v, where) for k, v in value.items()}
    raise ConfigError(f"{where}: expected a value of type {type_name(hint)}.")


def _to_table(part: Any, prefix: str = "") -> dict[str, Any]:
    table: dict[str, Any] = {}
    empty = []
    for field in dataclasses.fields(part):
        name, value = field.metadata.get("flag", field.name), getattr(part, field.name)
        if not field.init:
            continue
        if value is not None:
            table[name] = _to_value(value, prefix + name)
        elif field.default is not None:
            empty.append(name)
    return {**table, _NONE_KEY: empty} if empty else table


def _to_value(value: Any, name: str) -> Any:
    """Convert a field's value to a TOML value; the inverse of `_value`."""
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return value.name
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Duration | Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _to_table(value, name + ".")
    if isinstance(value, tuple | list):
        return [_to_value(v, name) for v in value]
    if isinstance(value, set | frozenset):
        return [_to_value(v, name) for v in sorted(value, key=repr)]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _to_value(v, name) for k, v in value.items()}
    raise ConfigError(
        f"--{name.replace('_', '-')} {value!r}: config.toml can't store a {type(value).__name__}; "
        "use numbers, strings, booleans, paths and enums, and lists, sets or dicts of them.")
