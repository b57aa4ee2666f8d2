"""The one thing a user writes: a `Task`, and how it is found by name or import path."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import math
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from trainer.errors import ConfigError

SPLITS = ("train", "validation", "test")

BUILT_IN = {
    "images": "trainer.tasks.images:Images",
    "photos": "trainer.tasks.photos:Photos",
    "shapes": "trainer.tasks.shapes:Shapes",
    "spiral": "trainer.tasks.spiral:Spiral",
    "text": "trainer.tasks.text:Text",
}
"""Name of a built-in task → its import path."""


CALLS = {"model": (), "dataset": ("split",), "loss": ("model", "batch"), "collate": ("samples",),
         "predict": ("model", "batch"), "parameter_groups": ("model",), "picture": ("model",),
         "fingerprint": (), "figures": (), "first_loss": ()}
"""Method of a task → what it is called with."""
NEEDED = ("model", "dataset", "loss")
ELSEWHERE = {
    "collate_fn": "collate(samples)", "param_groups": "parameter_groups(model)",
    "predict_step": "predict(model, batch)",
    **dict.fromkeys(("training_step", "train_step", "validation_step", "test_step"),
                    "loss(model, batch), with model.training telling the phase"),
    **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), "dataset(split)"),
    **dict.fromkeys(("configure_optimizers", "optimizer", "optimizers"),
                    "the class of --optim.name, with parameter_groups(model): one optimizer, which "
                    "takes the gradient of one loss (two in turns, as of a GAN, aren't supported)"),
}
"""Methods that other trainers call → what is called here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What the loss of one micro-batch came to, as sums, so that any split adds up to the same.

    Attributes:
        total: scalar tensor with a graph: the loss *summed* over what `count` counts; or several
            named ones as a dict, whose sum is minimised and which are logged one by one.
        count: what the mean is taken over (samples, tokens, a sum of weights): number or scalar
            tensor, 0 for a micro-batch of 0 samples.
        metrics: name → (sum, count), numbers or scalar tensors; logged as sum / count.
        table: counts (whole numbers) in any shape, as a confusion matrix; added over an evaluation,
            and left alone in training.
    """

    total: Tensor | Mapping[str, Tensor]
    count: Tensor | float
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = dataclasses.field(
        default_factory=dict
    )
    table: Tensor | None = None


def misused(outcome: Outcome) -> str:
    """What is no number in an `Outcome`; empty where all is."""
    named = {"Outcome.count": outcome.count}
    if not isinstance(outcome.metrics, Mapping):
        return (f"Outcome.metrics is a {type(outcome.metrics).__name__}; a dict is wanted, of "
                "name: (sum, count)")
    if outcome.table is not None and not isinstance(outcome.table, Tensor):
        return f"Outcome.table is a {type(outcome.table).__name__}; a tensor of counts is wanted"
    for name, pair in outcome.metrics.items():
        if not isinstance(name, str) or not name:
            return f"a metric's name is {name!r}; use a text"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return f"the metric {name!r} is a {type(pair).__name__}; it has to be (sum, count)"
        named |= {f"the sum of the metric {name!r}": pair[0],
                  f"the count of the metric {name!r}": pair[1]}
    for what, value in named.items():
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                return f"{what} is {tuple(value.shape)} {value.dtype}; a scalar is wanted: the sum"
        elif not isinstance(value, SupportsFloat) or isinstance(value, str):
            return f"{what} is a {type(value).__name__}; a number or a scalar tensor is wanted"
    if not isinstance(outcome.count, Tensor) and not 0 <= outcome.count < math.inf:
        return (f"Outcome.count is {outcome.count}; what the mean is taken over is 0 or more, and "
                "finite")
    return ""


@runtime_checkable
class Task(Protocol):
    """What is trained, on what, and how it is judged. A frozen dataclass: its fields are its flags.

    Optional members: `collate(samples) -> batch` makes a batch of a list of samples (default:
    torch's `default_collate`, through dataclasses too), and must bear a single one;
    `fingerprint() -> str` tells one data set from another (default: length and the content of 16
    keyed samples); `parameter_groups(model) -> list[dict]` replaces the split into
    decayed and not decayed parameters; `preload()` reads what all ranks need, once, in the process
    from which `python -m launch` forks them, so it starts no thread, touches no device and makes no
    tensor; `figures() -> {name: function}` gives further figures of an evaluation, each a function
    of (its means by name, "loss" among them; the summed `Outcome.table`, float64, or None);
    `first_loss() -> float` is the loss of a model that knows nothing yet (log C for C classes; 0:
    not known), beside which the measured one is looked at; `class_names` are the words of a table;
    `picture(model) -> HxWx3 uint8 array` is drawn after each validation, by one rank, so it takes
    part in no collective. A field named `seed` that is None takes the run's seed.
    """

    def model(self) -> nn.Module:
        """The model, freshly initialised from the process-wide generators."""
        ...

    def dataset(self, split: str) -> Dataset | IterableDataset | None:
        """The samples of "train", "validation" or "test"; None where there is no such split.

        A map-style data set may define `__getitems__(indices)`. `indices` is a list that also
        carries `indices.keys` (uint64 numpy array, one key a sample, a function of seed, epoch
        and sample) for batched random augmentation, and `indices.epoch`. What it returns is
        collated where it is a list, and taken as the finished batch otherwise. The same
        `__getitems__` must be able to return the batch of a single sample.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        """Sums over one micro-batch, valid for 0 samples; `model.training` tells the phase."""
        ...


def find_task(name: str) -> type:
    """The class behind `--task NAME|module:Class`.

    Raises:
        ConfigError: unknown name, or a module or class that can't be found. An exception inside
            the user's module is chained, so that its own traceback is shown.
    """
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "your own task is given as module:Class."
        raise ConfigError(f"--task {name or repr(name)}: no built-in task of this name; {hint} "
                          f"Built in: {', '.join(sorted(BUILT_IN))}.")
    found = load_object(path, flag="--task")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"--task {name}: {path} is not a dataclass; put "
                          "@dataclass(frozen=True) above the class, its fields are its flags.")
    missing = [m for m in NEEDED if not callable(getattr(found, m, None))]
    if missing:
        raise ConfigError(f"--task {name}: {path} has no method {', '.join(missing)}; a task "
                          "defines model(), dataset(split) and loss(model, batch).")
    try:
        typing.get_type_hints(found)
    except Exception as error:
        raise ConfigError(f"--task {name}: the types of its fields can't be looked up: {error}; "
                          "import what they name, not under TYPE_CHECKING alone.") from error
    return found


def uncalled(task: Any) -> str:
    """Methods of the task that look as if they were to be called, and aren't; empty: none."""
    told = [f"{name}() isn't called; what is called is {here}" for name, here in ELSEWHERE.items()
            if callable(getattr(task, name, None))
            and (here.partition("(")[0] in NEEDED or not hasattr(task, here.partition("(")[0]))]
    return f"{type(task).__name__}: {'; '.join(told)}" if told else ""


def refuse_calls(task: Any) -> None:
    """Raises: ConfigError: a method of the task can't be called as it is going to be."""
    task = getattr(task, "given", task)  # of one that is given as an object, its own methods
    if isinstance(model := getattr(task, "model", None), nn.Module):
        raise ConfigError(f"--task: model of {type(task).__name__} is a {type(model).__name__} "
                          "itself; let it be a method that makes one anew: def model(self).")
    for name, given in CALLS.items():
        if error := _unfit(getattr(task, name, None), *given):
            signature = inspect.signature(getattr(task, name))
            raise ConfigError(f"--task: {name}{signature} of {type(task).__name__} is called as "
                              f"{name}({', '.join(given)}), and that can't be: {error}; mend its "
                              "parameters (self is the first one).")


def _unfit(function: Any, *given: str) -> str:
    """Why the function can't be called with these; empty: it can, as far as is known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # there is none, or one in C
        return ""
    try:
        signature.bind(*given)
    except TypeError as error:
        return str(error)
    return ""


def figures_of(task: Any) -> dict[str, Any]:
    """The task's figures of an evaluation, by name; none where it has no such method.

    Raises:
        ConfigError: what it returns are none.
    """
    figures = task.figures() if hasattr(task, "figures") else {}
    if not isinstance(figures, Mapping) or not all(
            callable(figure) and not _unfit(figure, "means", "table")
            for figure in figures.values()):
        raise ConfigError(f"--task: figures() returned {figures!r}; return a dict of name: "
                          "function of the means and the table, such as {'perplexity': lambda "
                          "means, table: math.exp(means['loss'])}.")
    if taken := sorted(figures.keys() & {"loss", "samples", "table"}):
        raise ConfigError(f"--task: figures() has {taken[0]!r}; the validation has a val_"
                          f"{taken[0]} of its own: choose another name.")
    return dict(figures)


def take_task(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--task NAME` out of the arguments, as it decides which flags there are: name, rest.

    Raises:
        ConfigError: no name follows it.
    """
    rest: list[str] = []
    name = None
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--task":
            name = next(waiting, None)
            if name is None or name.startswith("-"):
                raise ConfigError("--task: give the name of a task or module:Class.")
        elif argument.startswith("--task="):
            name = argument.removeprefix("--task=")
        else:
            rest.append(argument)
    return name, rest


def load_object(path: str, flag: str) -> Any:
    """Import `module:name`, looking in the current folder too.

    Raises:
        ConfigError: names `flag` and what is wrong; the cause is chained.
    """
    module_name, _, name = path.partition(":")
    if not module_name:
        raise ConfigError(f"{flag} {path}: the module is missing; write module:Name.")
    with contextlib.suppress(OSError):  # the folder may be gone by now
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without a guard ends itself
        absent = isinstance(error, ModuleNotFoundError) and error.name is not None and (
            module_name == error.name or module_name.startswith(error.name + "."))
        spelt = _spelt(module_name, name)
        why = ("there is no such module on the import path; run from its folder or install it"
               f"{spelt}" if absent or (spelt and isinstance(error, TypeError)) else
               f"importing {module_name} raised {type(error).__name__}: {error}")
        raise ConfigError(f"{flag} {path}: {why}.") from (None if absent else error)
    if not name or not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {module_name}:{near[0]}?" if near else "write module:Name."
        raise ConfigError(f"{flag} {path}: {module_name} has no {name!r}; {hint}")
    return getattr(module, name)


def _spelt(file: str, name: str) -> str:
    """How an object in a file (`FOLDER/FILE.py`) is written as one in a module; empty: it's one."""
    if not (file.startswith(".") or file.endswith(".py") or "/" in file):
        return ""
    folder, _, stem = file.removesuffix(".py").removeprefix("./").rpartition("/")
    away = folder.startswith(("/", ".", "~"))  # not below the current folder
    module = ".".join([stem] if away else [*folder.split("/"), stem]).strip(".")
    return (f"; a module has a name and no path: write {module}:{name or 'Name'}"
            + (f", and run in {folder}" if away else ""))
