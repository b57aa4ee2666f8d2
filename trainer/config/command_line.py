"""Parse a recipe (TOML) and flags into a `Config`, and write a `Config` as TOML."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import shutil
import textwrap
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from trainer.config.fields import (
    SEVERAL,
    Duration,
    InvalidSetting,
    convert_value,
    flag_of,
    type_name,
)
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.task import BUILT_IN, RECORDED, find_task, split_task_argument
from trainer.telemetry.std_streams import quiet_broken_pipe

RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "sample"
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
# Both keys are keywords of Python, so that no field of a task can have their names.
_TASK_KEY = "class"
_NONE_KEY = "None"  # lists the fields that are None, since TOML has no null

_HELP = """\
Fault-tolerant training. RECIPE comes first: a TOML file, or one of:
{recipes}
(default: {default}). Flags override the recipe.

  torchrun --standalone --nproc_per_node=2 --max-restarts=3 -m trainer [RECIPE] [flags]
  python -m trainer [RECIPE] [flags]     one process, no launcher
  python -m trainer COMMAND --help       {commands}

A LENGTH is 200 (optimizer steps), 1ep (epochs), 5% (of the run) or off.
--task NAME|module:Class selects the task ({tasks}, or your own);
its fields are the flags --task.FIELD.

--quiet shows only warnings and errors (--log.level warning).
--run is accepted for --run-dir, except under torchrun, which takes it for its own --run-path.
"""


@dataclass(frozen=True)
class Setting:
    """A field of the configuration, of one of its sections, or of the task."""

    owner: type
    field: str
    name: str
    """Dotted name, as in config.toml."""
    hint: Any
    default: Any
    repeatable: bool

    @property
    def takes_several(self) -> bool:
        """Whether its flag takes any number of words."""
        kinds = (self.hint, *typing.get_args(self.hint))  # also for X | None
        return not self.repeatable and any(
            (typing.get_origin(kind) or kind) in (*SEVERAL, dict) for kind in kinds)


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
    task_name, arguments = split_task_argument(arguments)
    check_not_empty(arguments)
    path = find_recipe(recipe, commands.split(", "))
    task, values = _read_recipe(path, task_name)
    settings = _settings(task)
    if {"-h", "--help"} & set(arguments):
        if show:
            with quiet_broken_pipe():
                print(_help_text(settings, values, commands))
        raise SystemExit(0)
    flags = _read_flags(arguments, settings)
    by_flag = task_name is not None or any(name.startswith("task.") for name in flags)
    config = _configure(task, values, flags, path,
                        f"--task {task_name or ''}".strip() if by_flag else f"{path}: [task]")
    if config.run is None:
        name = Path(recipe).stem
        if task_name is not None and recipe == DEFAULT_RECIPE:
            name = task_name.rpartition(":")[2].lower()
        config = dataclasses.replace(config, run=f"runs/{name}")
    to_toml(config)  # raises if a value can't be written, before anything has started
    return config


def load(path: Path) -> Config[Any]:
    """Read a configuration from a TOML file.

    Raises:
        ConfigError: the file is invalid; names the file and the key.
    """
    task, values = _read_recipe(path, None)
    return _configure(task, values, {}, path, f"{path}: [task]")


def _read_recipe(path: Path, task_name: str | None) -> tuple[type, dict[str, Any]]:
    """The class of the task, and the recipe's values by dotted name.

    Args:
        task_name: replaces the recipe's task, together with its fields.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    fields = table.pop("task", {})
    named = fields.pop(_TASK_KEY, "images") if isinstance(fields, dict) else None
    if not isinstance(named, str):
        raise ConfigError(f"{path}: task = {fields!r}: write a table [task], with the task's name "
                          f"as its key {_TASK_KEY}.")
    if task_name not in (None, named):
        named, fields = task_name, {}
    task = find_task(named)
    settings = _settings(task)
    sections = {name.rpartition(".")[0] for name in settings} - {""} | {"task"}
    values = _flatten({**table, "task": fields}, sections, path)
    for name, value in values.items():
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help lists them all."
            raise ConfigError(f"{path}: unknown key {name}; {hint}")
        try:
            values[name] = convert_value(settings[name].hint, value)
        except ValueError as error:
            raise ConfigError(f"{path}: {name} = {value!r}: {error}.") from error
    return task, values


def _flatten(table: Mapping[str, Any], sections: set[str], path: Path, prefix: str = ""
             ) -> dict[str, Any]:  # fmt: skip
    """Values of a TOML table by dotted name, in the spelling of the fields."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        if key == _NONE_KEY and isinstance(value, list):
            found = {f"{prefix}{empty}": None for empty in value}
        elif name not in sections:
            found = {name: value}
        elif isinstance(value, dict):
            found = _flatten(value, sections, path, f"{name}.")
        else:
            raise ConfigError(f"{path}: {name} = {value!r}: write a table [{name}].")
        if twice := found.keys() & flat.keys():
            raise ConfigError(f"{path}: the key {min(twice)} is given twice, with _ and with -; "
                              "remove one.")
        flat |= found
    return flat


@functools.cache
def _settings(task: type) -> dict[str, Setting]:
    """All settings by dotted name, those of a class of task included."""
    found = {s.name: s for s in (*_leaves(Config, ""), *_leaves(task, "task."))}
    del found["task"]
    return found


def _leaves(cls: Any, prefix: str, base: Any = None) -> Iterator[Setting]:
    for field, name, hint, default in _fields(cls, prefix, base):
        if _is_section(hint):
            yield from _leaves(hint, f"{name}.", default)
        else:
            yield Setting(cls, field.name, name, hint, default,
                          field.metadata.get("repeatable", False))


def _fields(cls: Any, prefix: str, base: Any
            ) -> Iterator[tuple[dataclasses.Field[Any], str, Any, Any]]:  # fmt: skip
    """(field, dotted name, type, default) of each field; the defaults are those of `base`."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if base is not None:
            default = getattr(base, field.name)
        else:
            made = field.default_factory
            default = field.default if made is MISSING else made()
        if field.init:
            name = prefix + field.metadata.get("flag", field.name)
            hint = hints[field.name]
            yield field, name, hint, None if _is_section(hint) and default is MISSING else default


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Duration


def _read_flags(arguments: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Values of the flags by dotted name.

    Raises:
        ConfigError: a flag is unknown, or its value doesn't fit.
    """
    given: dict[str, list[list[str]]] = {}
    for flag, words in _with_words(arguments):
        name = flag.removeprefix("--").replace("-", "_")
        name = {"run_dir": "run"}.get(name, name)
        section, _, last = name.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}".removeprefix(".")
        if name == "quiet" and not words:
            name, words = "log.level", ["warning"]
        elif section in settings and settings[section].takes_several:  # one key of a dict
            name, words = section, [last, *words]
        elif name not in settings and positive in settings and settings[positive].hint is bool:
            if words:
                raise ConfigError(f"{flag} {' '.join(words)}: it takes no value.")
            name, words = positive, ["off"]
        elif name not in settings or not flag.startswith("--"):
            raise ConfigError(_unknown_flag(flag, settings))
        elif settings[name].hint is bool and not words:
            words = ["on"]
        given.setdefault(name, []).append(words)
    return {name: _value_of_flag(settings[name], words) for name, words in given.items()}


def _with_words(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words that follow it; a number may begin with -, other words with =."""
    flag, words = "", list[str]()
    for argument in [*arguments, "--"]:
        if argument.startswith("-") and not argument[1:2].isdigit() and argument[1:2] != ".":
            if flag:
                yield flag, words
            elif words:
                raise ConfigError(f"{words[0]}: it belongs to no flag; give one RECIPE, before all "
                                  "flags.")
            flag, equals, value = argument.partition("=")
            words = [value] if equals else []
        else:
            words.append(argument)


def _value_of_flag(setting: Setting, given: Sequence[Sequence[str]]) -> Any:
    """The value of a flag from its words, for each time it is given."""
    flag = flag_of(setting.name)
    for words in given if not setting.takes_several else ():
        if not words:
            raise ConfigError(f"{flag}: expected a value; write one that begins with - as "
                              f"{flag}=-…")
        if len(words) > 1:
            remedy = (f"repeat {flag} for each value, and quote a pattern, which the shell would "
                      "expand to file names" if setting.repeatable else
                      "quote a value that contains blanks")
            raise ConfigError(f"{flag} {' '.join(words)}: {words[1]!r} is an excess value; "
                              f"{remedy}.")
    every = [word for words in given for word in words]
    whole = setting.takes_several or setting.repeatable
    try:
        return convert_value(setting.hint, every if whole else every[-1], text=True)
    except ValueError as error:
        raise ConfigError(f"{' '.join([flag, *every])}: {error}.") from error


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


def _unknown_flag(flag: str, settings: Mapping[str, Setting]) -> str:
    """The message for an unknown flag, with the flag that was probably meant."""
    known = [flag_of(name) for name in settings]
    shown = flag.replace("_", "-")
    last = shown.rpartition(".")[2].lstrip("-")
    if last in _USUAL:
        near = [f"--{_USUAL[last]}"]
    else:
        near = [name for name in known if name.replace(".", "--").split("--")[-1] == last]
        near = near if len(near) == 1 else difflib.get_close_matches(shown, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "--help lists them all."
    single = "" if flag.startswith("--") else " (Write a value that begins with - as --flag=-….)"
    return f"{shown}: there is no such flag; {hint}{single}"


def _configure(
    task: type, recipe: Mapping[str, Any], flags: Mapping[str, Any], path: Path, task_source: str
) -> Config[Any]:
    """The configuration: defaults, overridden by the recipe, overridden by the flags."""
    values = dict(recipe)
    if flags.get("schedule.name", values.get("schedule.name")) != values.get("schedule.name"):
        for name in ("schedule.min_ratio", "schedule.options"):  # of the recipe's schedule
            values.pop(name, None)
    settings = _settings(task)
    for name, value in flags.items():
        before = values.get(name, settings[name].default)
        if settings[name].repeatable:
            value = (*before, *value)
        elif isinstance(value, dict) and isinstance(before, dict):
            value = {**before, **value}
        values[name] = value
    try:
        values["task"] = _build(task, values, "task.")
    except (TypeError, ValueError) as error:
        cause = None if isinstance(error, ConfigError) else error  # shown with its traceback
        raise ConfigError(f"{task_source}: {error}") from cause
    try:
        return _build(Config, values, "")
    except InvalidSetting as error:
        if error.name in recipe and error.name not in flags:
            raise ConfigError(f"{path}: {error}") from error
        raise


def _build(cls: Any, values: Mapping[str, Any], prefix: str, base: Any = None) -> Any:
    """Create a dataclass from values by dotted name."""
    given = {}
    for field, name, hint, default in _fields(cls, prefix, base):
        if _is_section(hint):
            given[field.name] = _build(hint, values, f"{name}.", default)
        elif values.get(name, default) is MISSING:
            raise ConfigError(f"{flag_of(name)}: this field has no default; give a value.")
        else:
            given[field.name] = values.get(name, default)
    return cls(**given)


def _help_text(settings: Mapping[str, Setting], recipe: Mapping[str, Any], commands: str) -> str:
    parser = argparse.ArgumentParser(
        usage="trainer [RECIPE] [--flag value …]", add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_HELP.format(
            recipes=", ".join(recipe_names()), default=DEFAULT_RECIPE, commands=commands,
            tasks=", ".join(sorted(BUILT_IN))))
    sections: dict[str, list[Setting]] = {}
    for setting in settings.values():
        sections.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    for name, members in sections.items():
        first_line = (members[0].owner.__doc__ or "").strip().partition("\n")[0]
        width = shutil.get_terminal_size().columns - 4
        group = parser.add_argument_group(name or "run", textwrap.fill(first_line, width))
        for setting in members:
            flag = flag_of(setting.name)
            default = recipe.get(setting.name, setting.default)
            shown = "" if default in (None, MISSING) else f" (default: {_as_words(default)})"
            about = _docs(setting.owner).get(setting.field, "")
            about = (about + (" (repeatable)" if setting.repeatable else shown)).replace("%", "%%")
            if setting.hint is bool:
                off = f"--{setting.name.rpartition('.')[0]}.no-{flag.rpartition('.')[2]}"
                group.add_argument(flag, off, action="store_true", help=about)
            else:
                group.add_argument(flag, metavar=type_name(setting.hint), help=about)
    return parser.format_help()


def _as_words(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, dict):
        value = [word for item in value.items() for word in item]
    if isinstance(value, SEVERAL):
        return " ".join(map(_as_words, value)) or "none"
    return value.name if isinstance(value, enum.Enum) else str(value) or "''"


@functools.cache
def _docs(cls: type) -> dict[str, str]:
    """Field → the docstring below it in the source."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # from a notebook, or built in
            continue
        definition = ast.parse(source).body[0]
        for field, after in pairwise(getattr(definition, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(
                    after.value, ast.Constant):
                found[ast.unparse(field.target)] = " ".join(str(after.value.value).split())
    return found


def saved_run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser for a command that takes a run, a checkpoint, and flags of the run."""
    parser = argparse.ArgumentParser(
        prog=f"trainer {command}", allow_abbrev=False, description=description,
        epilog="Any flag of the run may follow; it overrides the saved configuration (--device "
        "cpu).")
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP")
    return parser


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
