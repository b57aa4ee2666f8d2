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
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    init_fields,
    setting_name,
    type_hints,
    type_name,
)
from trainer.config.schema import Config, without_unread
from trainer.errors import ConfigError, FileDamaged
from trainer.storage.object_store import path_or_url
from trainer.storage.records import read_toml
from trainer.storage.secrets import hide, mask_arguments, masked
from trainer.task import BUILT_IN, RECORDED, find_task, split_task_argument
from trainer.telemetry.std_streams import quiet_broken_pipe

ONE_START = ("run", "resume", "inject", "accept")
"""Settings of a start, which belong on its command line: where it writes and what it reads, faults,
and what a change is allowed to be."""
RECIPES = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "sample"
_USUAL = {
    "accumulate-grad-batches": "batch.micro-size", "amp": "precision.dtype",
    "batch-size": "batch.global-size", "bf16": "precision.dtype", "ema-decay": "optim.ema",
    "fp16": "precision.dtype", "grad-clip": "clip.norm", "learning-rate": "optim.lr",
    "gradient-accumulation-steps": "batch.micro-size", "log-dir": "run-dir",
    "max-epochs": "epochs", "max-grad-norm": "clip.norm", "max-steps": "steps",
    "num-epochs": "epochs", "num-workers": "data.workers", "optimizer": "optim.name",
    "output-dir": "run-dir", "save-every": "checkpoint.every", "scheduler": "schedule.name",
    "warmup-steps": "schedule.warmup", "wd": "optim.weight-decay",
}  # fmt: skip
"""Flag name in other trainers → name here."""
_REPLACES = {
    "steps": ("epochs",), "epochs": ("steps",), "overfit": ("steps", "epochs"),
    "clip.norm": ("clip.value",), "clip.value": ("clip.norm",),
    "schedule.name": ("schedule.min_ratio", "schedule.options"),
    "optim.name": tuple(f"optim.{field}" for field in (
        "weight_decay", "betas", "eps", "momentum", "nesterov", "options"))}
"""Flag → settings of the recipe that belong to another choice than the flag's, and are dropped."""
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

--dry-run walks through the run in a few steps: stop, save, restore, validation, export.
--quiet shows only warnings and errors (--log.level warning).
--run is accepted for --run-dir, except under torchrun, which takes it for its own --run-path.
"""


@dataclass(frozen=True)
class Setting:
    """A field of the configuration, of one of its sections, or of the task: by its dotted name, as
    in config.toml."""

    owner: type
    field: dataclasses.Field[Any]
    name: str
    hint: Any
    default: Any

    @property
    def repeatable(self) -> bool:
        """Whether each use of its flag adds a value."""
        return bool(self.field.metadata.get("repeatable"))

    @property
    def takes_several(self) -> bool:
        """Whether its flag takes any number of words."""
        kinds = (self.hint, *typing.get_args(self.hint))  # also for X | None
        return not self.repeatable and any(
            (typing.get_origin(kind) or kind) in (*SEVERAL, dict) for kind in kinds)


def parse_config(argv: Sequence[str], *, show: bool = True, commands: str = "") -> Config[Any]:
    """Parse a command line: recipe and flags. After `--help`, which prints a text (`show`) with the
    names of the other `commands`, raises SystemExit(0)."""
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
        of_task = task_name is not None and recipe == DEFAULT_RECIPE
        name = str(task_name).rpartition(":")[2].lower() if of_task else Path(recipe).stem
        config = dataclasses.replace(config, run=f"runs/{name}{'-overfit' * bool(config.overfit)}")
    to_toml(config)  # raises if a value can't be written, before anything has started
    return config


def load_without_task(path: Path) -> Config[Any]:
    """Read a configuration from a TOML file, but not its task, whose code would be imported."""
    table = _read_table(path)
    del table["task"]
    return _configure(NoTask, _values_of(table, NoTask, path), {}, path, str(path))


@dataclass(frozen=True)
class NoTask:
    """A task without fields."""


def _read_recipe(path: Path, task_name: str | None) -> tuple[type, dict[str, Any]]:
    """The task's class, by default the recipe's, and the recipe's values by dotted name."""
    table = _read_table(path)
    named = table["task"].pop(_TASK_KEY, "images")
    if task_name not in (None, named):
        named, table["task"] = task_name, {}
    task = find_task(str(named))
    return task, _values_of(table, task, path)


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = read_toml(path)
    except FileDamaged as error:
        raise ConfigError(f"recipe {error}") from error
    except OSError as error:
        raise ConfigError(f"recipe {path}: {error}") from error
    if not isinstance(fields := table.setdefault("task", {}), dict):
        raise ConfigError(f"{path}: task = {fields!r}: write a table [task], with the task's name "
                          f"as its key {_TASK_KEY}.")
    return table


def _values_of(table: Mapping[str, Any], task: type, path: Path) -> dict[str, Any]:
    """The values of a recipe's table by dotted name; a setting of `ONE_START` is refused."""
    settings = _settings(task)
    sections = {name.rpartition(".")[0] for name in settings} - {""} | {"task"}
    values: dict[str, Any] = {}
    for name, value in _flatten(table, sections, path):
        if name not in settings:
            raise ConfigError(f"{path}: unknown key {name}; {_did_you_mean(name, settings)}")
        try:
            values[name] = convert_value(settings[name].hint, value)
        except ValueError as error:
            shown = masked(name, value)
            raise ConfigError(f"{path}: {name} = {shown!r}: {error}.") from error
        if name in ONE_START:
            raise ConfigError(f"{path}: {name} = {value!r}: a recipe can't decide this; remove it, "
                              f"and give {flag_of(name)} on the command line.")
    return without_unread(values)


def _flatten(
    table: Mapping[str, Any], sections: set[str], path: Path, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The values of a TOML table by dotted name, in the spelling of the fields."""
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        if key == _NONE_KEY and isinstance(value, list):
            yield from ((f"{prefix}{empty}", None) for empty in value)
        elif name not in sections:
            yield name, value
        elif isinstance(value, dict):
            yield from _flatten(value, sections, path, f"{name}.")
        else:
            raise ConfigError(f"{path}: {name} = {value!r}: write a table [{name}].")


@functools.cache
def _settings(task: type) -> dict[str, Setting]:
    """All settings by dotted name, those of a class of task included."""
    found = {s.name: s for s in (*_settings_of(Config, ""), *_settings_of(task, "task."))}
    del found["task"]
    return found


def _settings_of(cls: Any, prefix: str, base: Any = None) -> Iterator[Setting]:
    """The settings of a class; their defaults are those of the instance `base`, if given."""
    hints = type_hints(cls)
    for field in init_fields(cls):
        default = getattr(base, field.name, field.default)
        if base is None and field.default_factory is not MISSING:
            default = field.default_factory()
        hint, name = hints[field.name], prefix + setting_name(field)
        if _is_section(hint):
            plain = default is MISSING or cls is Config  # whose sections fill in values
            yield from _settings_of(hint, f"{name}.", None if plain else default)
        else:
            yield Setting(cls, field, name, hint, default)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint is not Duration


def _read_flags(arguments: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    given: dict[str, list[list[str]]] = {}
    for flag, words in _with_words(arguments):
        name = flag.removeprefix("--").replace("-", "_")
        name = {"run_dir": "run"}.get(name, name)
        positive = name.replace(".no_", ".")
        if name == "quiet" and not words:
            name, words = "log.level", ["warning"]
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
            repeat = f"repeat {flag} for each value, and " if setting.repeatable else ""
            shown = mask_arguments([flag, *words])
            raise ConfigError(f"{' '.join(shown)}: {shown[2]!r} is an excess value; {repeat}"
                              "quote a value that has blanks or that the shell would expand.")
    every = [word for words in given for word in words]
    whole = setting.takes_several or setting.repeatable
    try:
        return convert_value(setting.hint, every if whole else every[-1], text=True)
    except ValueError as error:
        raise ConfigError(f"{' '.join(mask_arguments([flag, *every]))}: {error}.") from error


def check_not_empty(arguments: Sequence[str]) -> None:
    """Refuse empty values, as from an unset variable of the shell, except for a task's fields."""
    for before, argument in pairwise(["", *arguments]):
        flag = before if argument == "" else argument[:-1] if argument.endswith("=") else ""
        if flag.startswith("--") and "=" not in flag and not flag.startswith("--task."):
            raise ConfigError(f"{flag} '': the value is empty; give one, or omit the flag.")


def _unknown_flag(flag: str, settings: Mapping[str, Setting]) -> str:
    """The message for an unknown flag, with the flag that was probably meant."""
    known = [flag_of(name) for name in settings]
    shown = flag.replace("_", "-")
    last = shown.rpartition(".")[2].lstrip("-")
    meant = [f"--{_USUAL[last]}"] if last in _USUAL else [
        name for name in known if name.rpartition(".")[2].removeprefix("--") == last]
    hint = f"did you mean {meant[0]}?" if len(meant) == 1 else _did_you_mean(shown, known)
    single = "" if flag.startswith("--") else " (Write a value that begins with - as --flag=-….)"
    return f"{shown}: there is no such flag; {hint}{single}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "--help lists them all."


def _configure(
    task: type, recipe: Mapping[str, Any], flags: Mapping[str, Any], path: Path, task_source: str
) -> Config[Any]:
    """The configuration: defaults, overridden by the recipe, overridden by the flags."""
    settings = _settings(task)
    values = {name: setting.default for name, setting in settings.items()} | dict(recipe)
    for flag, replaced in _REPLACES.items():
        if flag in flags and flags[flag] != values[flag]:
            values |= {name: settings[name].default for name in replaced}
    for name, value in flags.items():
        values[name] = (*values[name], *value) if settings[name].repeatable else value
    hide(values.items())
    try:
        for name, value in values.items():
            if value is MISSING:
                raise ConfigError(f"{flag_of(name)}: this field has no default; give a value.")
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


def _build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = type_hints(cls)
    given = {}
    for field in init_fields(cls):
        hint, name = hints[field.name], prefix + setting_name(field)
        given[field.name] = _build(hint, values, f"{name}.") if _is_section(hint) else values[name]
    return cls(**given)


def _help_text(settings: Mapping[str, Setting], recipe: Mapping[str, Any], commands: str) -> str:
    parser = argparse.ArgumentParser(
        usage="trainer [RECIPE] [--flag value …]", add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, description=_HELP.format(
            recipes=", ".join(recipe_names()), default=DEFAULT_RECIPE, commands=commands,
            tasks=", ".join(sorted(BUILT_IN))))
    groups: dict[str, Any] = {}
    for name, setting in settings.items():
        section, flag = name.rpartition(".")[0], flag_of(name)
        if section not in groups:
            first_line = (setting.owner.__doc__ or "").strip().partition("\n")[0]
            groups[section] = parser.add_argument_group(section or "run", textwrap.fill(
                first_line, shutil.get_terminal_size().columns - 4))
        default = recipe.get(name, setting.default)
        about = _docs(setting.owner).get(setting.field.name, "")
        if setting.repeatable:
            about += " (repeatable)"
        elif default not in (None, MISSING):
            about += f" (default: {_as_words(default)})"
        about = about.replace("%", "%%")
        if setting.hint is bool:
            off = f"--{section}.no-{flag.rpartition('.')[2]}"
            groups[section].add_argument(flag, off, action="store_true", help=about)
        else:
            groups[section].add_argument(flag, metavar=type_name(setting.hint), help=about)
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
            definition: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError):  # from a notebook, or built in
            continue
        for field, after in pairwise(definition.body):
            match field, after:
                case ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                    found[ast.unparse(field.target)] = " ".join(text.split())
    return found


def saved_run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser for a command that takes a run, a checkpoint, and flags of the run."""
    parser = argparse.ArgumentParser(
        prog=f"trainer {command}", allow_abbrev=False, description=description, epilog="Any flag "
        "of the run may follow; it overrides the saved configuration (--device cpu).")
    parser.add_argument("run", type=path_or_url, help="a run folder, or the URL of its mirror")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP")
    return parser


def split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split arguments into a command's own options and the rest, which are training flags."""
    options, rest = parser.parse_known_args(argv)
    own = [flag for action in parser._actions for flag in action.option_strings]
    for argument in rest:
        flag = argument.partition("=")[0]
        near = difflib.get_close_matches(flag, own, n=1, cutoff=0.8)
        if near and "." not in flag:  # probably misspelt
            raise ConfigError(f"{flag}: there is no such flag; did you mean {near[0]}?")
    return options, rest


def to_toml(config: Config[Any]) -> str:
    """The text of `config.toml`: all settings, except those of one attempt."""
    table = _to_table(config, "")
    for name in ONE_START:
        table.pop(name, None)
    for name in ("mirror", "mirror_every"):  # another start from this file is another run
        table["checkpoint"].pop(name, None)
    table["task"] = {_TASK_KEY: task_path(config.task), **table["task"]}
    # In TOML, a key that follows a table would belong to it.
    return tomli_w.dumps(dict(sorted(table.items(), key=lambda item: isinstance(item[1], dict))))


def task_path(task: Any) -> str:
    """The value of `--task` that selects the task's class."""
    path = f"{type(task).__module__}:{type(task).__qualname__}"
    path = RECORDED.get(path, path)
    return next((name for name, known in BUILT_IN.items() if known == path), path)


def _to_table(part: Any, prefix: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    empty = []
    for field in init_fields(part):
        name, value = setting_name(field), getattr(part, field.name)
        if value is not None:
            table[name] = _to_value(value, prefix + name)
        elif field.default is not None:
            empty.append(name)
    return {**table, _NONE_KEY: empty} if empty else table


def _to_value(value: Any, name: str) -> Any:
    """Convert a field's value to a TOML value; the inverse of `convert_value`."""
    if isinstance(value, enum.Enum) and value.name in type(value).__members__:
        return value.name
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Duration | Path):
        return str(value)
    if _is_section(type(value)):
        return _to_table(value, name + ".")
    if isinstance(value, SEVERAL):
        ordered = value if isinstance(value, tuple | list) else sorted(value, key=repr)
        return [_to_value(v, name) for v in ordered]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _to_value(v, name) for k, v in value.items()}
    raise ConfigError(
        f"{flag_of(name)} {value!r}: config.toml can't store a {type(value).__name__}; "
        "use numbers, strings, booleans, paths and enums, and lists, sets or dicts of them.")


def recipe_names() -> list[str]:
    return sorted(p.stem for p in RECIPES.glob("*.toml"))


def find_recipe(recipe: str, commands: Sequence[str] = ()) -> Path:
    """The file of a recipe, given by name or path, which may be a misspelt command."""
    for path in (Path(recipe), RECIPES / f"{recipe}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return path
    near = difflib.get_close_matches(recipe, [*recipe_names(), *commands], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    why = ("this is no TOML file" if recipe and Path(recipe).exists() else
           "there is no such file, shipped recipe or command")
    raise ConfigError(f"recipe {recipe or repr(recipe)}: {why}; "
                      f"{hint}Shipped recipes: {', '.join(recipe_names())}.")
