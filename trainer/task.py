"""The `Task` protocol, which users implement, and the lookup of a task by name or import path."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import enum
import importlib
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from trainer.errors import ConfigError

SPLITS = ("train", "validation", "test")

BUILT_IN = {
    "images": "trainer.tasks.images:Images", "photos": "trainer.tasks.photos:Photos",
    "ring": "trainer.tasks.ring:Ring",
    "shapes": "trainer.tasks.shapes:Shapes", "spiral": "trainer.tasks.spiral:Spiral",
    "text": "trainer.tasks.text:Text", "text-muon": "trainer.tasks.text:MuonText",
}
"""Name of a built-in task → its import path."""

RECORDED = {"trainer.task:ObjectTask": "trainer.given:Given"}
"""Class → its name in run folders, which stays when the class moves."""

RESERVED_METRICS = ("step", "epoch", "loss", "lr", "lrs", "grad_norm", "samples", "scale",
                    "skipped", "replaced", "train_loss", "table", "turn")
"""Names that a task's metric can't have: the metrics file uses them, and each `val_NAME`."""

METHOD_ARGUMENTS = {
    "model": (), "dataset": ("split",), "loss": ("model", "batch"), "collate": ("samples",),
    "predict": ("model", "batch"), "parameter_groups": ("model",), "picture": ("model",),
    "text": ("model",),
    "optimizers": ("model",), "after_step": ("model", "step"), "epoch": ("number",),
    "fingerprint": (), "figures": (), "first_loss": (), "metrics": ()}
"""Method of a task → names of its arguments."""
REQUIRED_METHODS = ("model", "dataset", "loss")
FOREIGN_METHODS = {
    "collate_fn": "collate(samples)", "param_groups": "parameter_groups(model)",
    "predict_step": "predict(model, batch)",
    **dict.fromkeys(("training_step", "train_step", "validation_step", "test_step"),
                    "loss(model, batch), where model.training is False in evaluation"),
    **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), "dataset(split)"),
    **dict.fromkeys(("configure_optimizers", "optimizer"),
                    "optimizers(model), or parameter_groups(model) for the one of --optim.name"),
}
"""Method names of other trainers → the equivalent here."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of one micro-batch, as sums: any split of a batch then adds up to the same result.

    Attributes:
        total: scalar tensor with a graph: the loss *summed* over the elements that `count` counts;
            or a dict of named losses, whose sum is minimised and which are logged separately.
        count: denominator of the mean (samples, tokens, a sum of weights): number or scalar
            tensor.
        metrics: name → (sum, count), numbers or scalar tensors; logged as sum / count.
        table: integer counts of any shape, such as a confusion matrix; summed over an evaluation,
            ignored in training.
        predictions: arguments of `update` of each of `Task.metrics()`, such as (preds, target), or
            a dict of name: arguments; ignored in training.
    """

    total: Tensor | Mapping[str, Tensor]
    count: Tensor | float
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = dataclasses.field(
        default_factory=dict)
    table: Tensor | None = None
    predictions: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None


_MAPPING = (dict, Mapping)  # between the passes of a model, a check by Mapping alone takes 12 us
_IS_FIRST_BATCH = ContextVar("is_first_batch", default=False)


@contextlib.contextmanager
def first_batch() -> Iterator[None]:
    """Context of the first loss of a run: the losses of `trainer.tasks.losses` check their
    arguments in it."""
    token = _IS_FIRST_BATCH.set(True)
    try:
        yield
    finally:
        _IS_FIRST_BATCH.reset(token)


def is_first_batch() -> bool:
    return _IS_FIRST_BATCH.get()


def check_outcome(outcome: Any) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
    """Check an `Outcome`; return the scalar total loss, and the metrics with each named loss."""
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"the task's loss returned {type(outcome).__name__}; return "
                          "trainer.Outcome(total, count, metrics={name: (sum, count)}).")
    total, losses = outcome.total, dict[str, tuple[Any, Any]]()
    if not isinstance(total, Tensor) and isinstance(total, _MAPPING):
        losses = {name: (value, outcome.count) for name, value in total.items()}
        total = torch.stack([value.float() for value in total.values()]).sum()
    if wrong := _find_misuse(outcome, total, losses):
        raise ConfigError(f"the task's loss: {wrong}.")
    return total, losses | dict(outcome.metrics)


def _find_misuse(outcome: Outcome, total: Any, losses: Mapping[str, Any]) -> str:
    """What is wrong with an `Outcome`; empty if nothing is."""
    if not isinstance(total, Tensor) or total.dim() != 0 or total.is_complex():
        return (f"Outcome.total is {_form(total)}; return a scalar tensor: the loss summed over "
                "the micro-batch")
    if outcome.table is not None and not isinstance(outcome.table, Tensor):
        return f"Outcome.table is {_form(outcome.table)}; use a tensor of counts"
    if not isinstance(outcome.metrics, _MAPPING):
        return f"Outcome.metrics is {_form(outcome.metrics)}; use a dict of name: (sum, count)"
    for name in (*losses, *outcome.metrics):
        if not isinstance(name, str) or name in RESERVED_METRICS or name.startswith("val_"):
            return (f"a metric {name!r}; use another string: reserved are "
                    f"{', '.join(RESERVED_METRICS)} and all that begin with val_")
    if losses and (twice := losses.keys() & outcome.metrics.keys()):
        return f"{min(twice)!r} both as a loss and a metric; choose another name for one of them"
    for name, pair in outcome.metrics.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return f"the metric {name!r} is {_form(pair)}; use (sum, count)"
        if not (_is_scalar(pair[0]) and _is_scalar(pair[1])):
            return (f"the sum and the count of the metric {name!r} are {_form(pair[0])} and "
                    f"{_form(pair[1])}; use numbers or scalar tensors")
    if not _is_scalar(outcome.count):
        return f"Outcome.count is {_form(outcome.count)}; use a number or a scalar tensor: the sum"
    if not isinstance(outcome.count, Tensor) and not 0 <= outcome.count < math.inf:
        return (f"Outcome.count is {outcome.count}; the denominator of the mean must be finite and "
                "0 or more")
    return ""


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return hasattr(value, "__float__")


def _form(value: Any) -> str:
    return (f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else
            f"a {type(value).__name__}")


@runtime_checkable
class Task(Protocol):
    """Model, data and loss of a training run. A frozen dataclass: its fields become flags.

    Optional members:
    - `collate(samples) -> batch` stacks a list of samples into a batch; it must accept a single
      sample. Default: torch's `default_collate`, extended to dataclasses.
    - `predict(model, batch)` returns what `trainer predict` writes for each sample.
    - `fingerprint() -> str` identifies the training data. Default, as of the other splits: length
      and content of 16 keyed samples.
    - `parameter_groups(model) -> list[dict]` replaces the split into parameters with and without
      weight decay.
    - `weights(dataset)`: for each training sample, for `--data.sampler weighted`; for each data set
      of a ConcatDataset, for `mixture`.
    - `labels(dataset)`: for each training sample, for `--data.sampler balanced`.
    - `lengths(dataset)`: for each training sample, for `--data.sampler like-length`.
    - `optimizers(model) -> dict` makes several optimizers, in place of the one of `--optim`: name →
      a `torch.optim.Optimizer`, or a tuple of it with a `Schedule` and/or a `Clip` of its own
      (`trainer.config.schema`). Each trainable parameter belongs to one of them.
    - `turns`, a tuple of these names, lets each step update one of them: step n that of the turn
      (n - 1) mod len(turns). In training the loss is then called as `loss(model, batch, turn=NAME)`
      and only the parameters of that optimizer get gradients; an evaluation gives no turn, so
      define `loss(self, model, batch, turn=None)`.
    - `after_step(model, step)` is called on every rank after each update (not a skipped one),
      without gradients, and may change parameters and buffers: it belongs to the update, in saves
      too. Its random numbers are keyed by the step.
    - `epoch(number)` is called on every rank before the first step of each epoch (from 0), and
      again where a run is resumed in it. Its random numbers are keyed by the epoch.
    - `preload()` reads data that all ranks need, once, in the process from which `python -m launch`
      forks them. It must not start threads, use a device or create tensors.
    - `figures() -> {name: function}` defines further metrics of an evaluation. Each function takes
      the means by name (including "loss") and the summed `Outcome.table` (float64, or None).
    - `metrics() -> {name: torchmetrics.Metric}`, or a MetricCollection, defines metrics of an
      evaluation that are no means, updated with `Outcome.predictions`, which may leave some out
      for a validation set of another kind.
    - `first_loss() -> float` is the expected loss of an untrained model (log C for C classes; 0:
      unknown); the measured initial loss is compared with it.
    - `validation_sets` names further validation sets, `dataset("validation:NAME")`, whose metrics
      are `val_NAME_loss` and so on. The first one also gives `val_loss` if there is no
      `dataset("validation")`.
    - `class_names` labels the rows and columns of the table.
    - `picture(model) -> HxWx3 uint8 array` is drawn after each validation by one rank, so it must
      not call collectives; `text(model) -> str` is written in the same way.

    A field `seed` that is None is set to the run's seed.
    """

    def model(self) -> nn.Module:
        """The model, newly initialised from the process-wide random generators."""
        ...

    def dataset(self, split: str) -> Dataset | IterableDataset | None:
        """The data set of "train", "validation" or "test"; None if the split doesn't exist.

        A map-style data set may define `__getitems__(indices)`. `indices` is a list with the
        attributes `indices.keys` (uint64 numpy array for batched random augmentation, one key per
        sample, a function of seed, epoch and sample) and `indices.epoch`. A returned list is
        collated; any other value is used as the complete batch. `__getitems__` must also accept a
        single index.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        """Sums over one micro-batch; `model.training` is False in evaluation."""
        ...


def check_signatures(task: Any) -> None:
    """Raise ConfigError if a method of the task doesn't accept the arguments of its call."""
    task = getattr(task, "given", task)  # for a task given as an object, its own methods
    if isinstance(model := getattr(task, "model", None), nn.Module):
        raise ConfigError(f"--task: model of {type(task).__name__} is a {type(model).__name__}; "
                          "make it a method that returns a new model: def model(self).")
    for name, given in METHOD_ARGUMENTS.items():
        try:
            signature = inspect.signature(getattr(task, name, None))  # type: ignore[arg-type]
        except (TypeError, ValueError):  # no such method, or one implemented in C
            continue
        ways: list[dict[str, str]] = [{}]
        if name == "loss" and getattr(task, "turns", None) and method_of(task, "optimizers"):
            ways.append({"turn": "NAME"})
        for keywords in ways:
            try:
                signature.bind(*given, **keywords)
            except TypeError as error:
                call = ", ".join([*given, *(f"{key}={text}" for key, text in keywords.items())])
                raise ConfigError(f"--task: {name}{signature} of {type(task).__name__} is called "
                                  f"as {name}({call}), which fails: {error}; correct its "
                                  "parameters (self is the first one).") from error


def method_of(task: Any, name: str) -> Callable[..., Any] | None:
    """An optional method of a task; None without one, also if a field has its name."""
    found = getattr(task, name, None)
    return found if callable(found) else None


def splits_of(task: Any) -> tuple[str, ...]:
    """The arguments of the calls of `Task.dataset`."""
    names = getattr(task, "validation_sets", ())
    if callable(names) or not isinstance(names, tuple | list) or not all(
            isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) for name in names) or (
            len({*names}) < len(names)):
        raise ConfigError(f"--task: validation_sets is {names!r}; make it a tuple of different "
                          "names of letters, digits and _ . -, such as ('clean', 'noisy').")
    return (*SPLITS, *(f"validation:{name}" for name in names))


def task_figures(task: Any) -> dict[str, Any]:
    """The functions returned by `Task.figures`, by name; empty without such a method."""
    figures = call() if (call := method_of(task, "figures")) else {}
    if not isinstance(figures, Mapping) or not all(map(callable, figures.values())):
        raise ConfigError(f"--task: figures() returned {figures!r}; return a dict of name: "
                          "function of the means and the table, such as {'perplexity': lambda "
                          "means, table: math.exp(means['loss'])}.")
    if taken := sorted(figures.keys() & {"loss", "samples", "table"}):
        raise ConfigError(f"--task: figures() has {taken[0]!r}, but val_{taken[0]} is reserved; "
                          "choose another name.")
    return dict(figures)


def task_metrics(task: Any) -> dict[str, Any]:
    """The metrics returned by `Task.metrics`, by name; empty without such a method."""
    if (call := method_of(task, "metrics")) is None:
        return {}
    found = call()
    metrics: dict[Any, Any] = dict(found.items()) if hasattr(found, "items") else {None: found}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not all(hasattr(metric, member) for member in (
                "update", "compute", "add_state", "modules")):
            raise ConfigError(
                f"--task: metrics(): a {type(metric).__name__} in place of a metric; return a dict "
                "of name: torchmetrics.Metric, or one MetricCollection.")
        if name in (*RESERVED_METRICS, *task_figures(task)):
            raise ConfigError(f"--task: metrics() has {name!r}, but val_{name} is taken; choose "
                              "another name.")
    return metrics


def uncalled_methods(task: Any) -> str:
    """A warning about methods with names of other trainers, which are never called; empty: none."""
    found = []
    for name, here in FOREIGN_METHODS.items():
        method = here.partition("(")[0]
        if callable(getattr(task, name, None)) and (
                method in REQUIRED_METHODS or not hasattr(task, method)):
            found.append(f"{name}() isn't called; instead define {here}")
    return f"{type(task).__name__}: {'; '.join(found)}" if found else ""


@dataclass(frozen=True)
class ObjectTask:
    """A task that can't be recreated from config.toml, such as one with tensors in memory.

    It delegates to the object. The fields are saved in the run folder; an instance created from
    them in another process has no object and can't be trained.
    """

    path: str = ""
    """Module and class of the object."""
    holds: tuple[str, ...] = ()
    """NAME=VALUE of a dataclass's fields: dtype and shape of tensors and arrays, the class of
    other objects."""

    @classmethod
    def of(cls, task: Any) -> ObjectTask:
        """Wrap an object and describe it."""
        names = [f.name for f in dataclasses.fields(task)] if dataclasses.is_dataclass(task) else []
        described = tuple(f"{name}={_described(getattr(task, name))}" for name in names)
        wrapped = cls(path=f"{type(task).__module__}:{type(task).__qualname__}", holds=described)
        object.__setattr__(wrapped, "given", task)
        return wrapped

    def model(self) -> Any:
        return self._object().model()

    def dataset(self, split: str) -> Any:
        return self._object().dataset(split)

    def loss(self, model: Any, batch: Any) -> Any:
        return self._object().loss(model, batch)

    def __getattr__(self, name: str) -> Any:  # the object's other attributes
        if name.startswith("__") or "given" not in vars(self):
            raise AttributeError(name)
        return getattr(self.given, name)

    def __str__(self) -> str:
        return self.path

    def _object(self) -> Any:
        if "given" not in vars(self):
            raise ConfigError(
                f"--task {self.path}: this run's task was passed as an object, which exists only "
                "in the process that created it; continue there with trainer.train(), or move the "
                "class to a module and use fields that config.toml can hold.")
        return self.given


def _described(value: Any) -> str:
    """Describe a value without addresses: equal in each process that creates the same object."""
    if value is None or isinstance(value, bool | int | float | str | enum.Enum | Path):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_described, value)) + "]"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        sizes = "x".join(map(str, value.shape))
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')} {sizes}".strip()
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def split_task_argument(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `--task NAME` from the other arguments; the task determines which flags exist."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", nargs="?", const="")
    options, rest = parser.parse_known_args(arguments)
    if options.task == "":
        raise ConfigError("--task: give the name of a task or module:Class.")
    return options.task, rest


def find_task(name: str) -> type:
    """The task class for `--task NAME|module:Class`."""
    recorded = {old: path for path, old in RECORDED.items()}
    path = BUILT_IN.get(name, recorded.get(name, name))
    if ":" not in path:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "write your own task as module:Class."
        raise ConfigError(f"--task {name or repr(name)}: no built-in task of this name; {hint} "
                          f"Built in: {', '.join(sorted(BUILT_IN))}.")
    found = load_object(path, flag="--task")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ConfigError(f"--task {name}: {path} is not a dataclass; put "
                          "@dataclass(frozen=True) above the class; its fields become flags.")
    missing = [m for m in REQUIRED_METHODS if not callable(getattr(found, m, None))]
    if missing:
        raise ConfigError(f"--task {name}: {path} has no method {', '.join(missing)}; a task "
                          "defines model(), dataset(split) and loss(model, batch).")
    try:
        typing.get_type_hints(found)
    except Exception as error:
        raise ConfigError(f"--task {name}: the types of its fields can't be resolved: {error}; "
                          "import them at run time too, not only under TYPE_CHECKING.") from error
    return found


def load_object(path: str, flag: str) -> Any:
    """Import `module:name`, also from the current folder; an error names `flag`."""
    module_name, _, name = path.partition(":")
    if not module_name:
        raise ConfigError(f"{flag} {path}: the module is missing; write module:Name.")
    file = Path(module_name)
    if file.suffix == ".py" or "/" in module_name or module_name.startswith("."):
        outside = file.is_absolute() or ".." in file.parts  # not below the current folder
        module_name = file.stem if outside else ".".join(file.with_suffix("").parts)
        where = f", and run in {file.parent}" if outside else ""
        raise ConfigError(f"{flag} {path}: give a module name, not a path: write "
                          f"{module_name.strip('.')}:{name or 'Name'}{where}.")
    with contextlib.suppress(OSError):  # the current folder may have been removed
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # SystemExit: a script without a __main__ guard
        absent = isinstance(error, ModuleNotFoundError) and error.name is not None and (
            module_name == error.name or module_name.startswith(error.name + "."))
        why = ("there is no such module on the import path; run from its folder or install it"
               if absent else
               f"importing {module_name} raised {type(error).__name__}: {error}")
        raise ConfigError(f"{flag} {path}: {why}.") from (None if absent else error)
    if not name or not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {module_name}:{near[0]}?" if near else "write module:Name."
        raise ConfigError(f"{flag} {path}: {module_name} has no {name!r}; {hint}")
    return getattr(module, name)
