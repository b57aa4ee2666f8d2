"""`python -m trainer predict RUN`: write the outputs of a checkpoint's model to a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from trainer.config import command_line
from trainer.data.batch import to_device
from trainer.errors import ConfigError, listed
from trainer.run.saved_run import (
    SavedRun,
    config_error_on_write,
    named_fields,
    open_saved_run,
    output_leaves,
    record_first_call,
)
from trainer.storage import files, layout
from trainer.task import method_of
from trainer.telemetry.events import Log, writable

Row = dict[str, Any]
"""The outputs of a batch by name: a tensor with a row for each sample, or a list with an entry."""
KINDS = (".safetensors", ".jsonl")
INDEX = "index"
REMEDY = "choose a file that can be written"


def main(argv: Sequence[str]) -> int:
    """Write the predictions; exit code 2 if there is no checkpoint or no such data."""
    parser = command_line.saved_run_parser(
        "predict", "Write the output of a checkpoint's model for each sample of a split, in the "
        "order of the data set: the result of the task's predict(model, batch), or the output of "
        "the model in its loss. A safetensors file has `index` (N) and `output` (N rows), or "
        "several outputs by name; a .jsonl file has one line {\"index\": …, \"output\": …} for "
        "each sample; the outputs may differ in size, and be strings, "
        "lists and dicts.")
    parser.add_argument("--split", help="any split that the task's dataset() accepts; default: "
                        "test, or validation if there is no test set")
    parser.add_argument("--out", type=Path, metavar="FILE.safetensors|FILE.jsonl",
                        help="default: RUN/predictions/SPLIT-step-N.safetensors, or .jsonl if an "
                        "output is no tensor or its size differs between batches")
    options, overrides = command_line.split(parser, argv)
    if options.out is not None:
        _check_path(options.out)
    elif isinstance(options.run, str):
        raise ConfigError(f"--out: the predictions of {options.run} need a file on this machine; "
                          "add --out predictions.safetensors.")
    reader = open_saved_run(options.run, checkpoint=options.checkpoint, overrides=overrides)
    split, rows = _predict(reader, options.split)
    step = reader.weights.step
    sizes = {tuple(column.shape[1:] if isinstance(column, Tensor) else None
                   for column in row.values()) for row in rows}
    kind = KINDS[len(sizes) > 1 or None in sizes.pop()]
    name = f"{split}-{layout.step_name(step)}{kind}"
    out = options.out or Path(options.run, "predictions", name)
    origin = {"run": writable(str(options.run)), "step": str(step), "split": split}
    encoded = _lines(rows) if out.suffix == ".jsonl" else [save(_stacked(rows), origin)]
    with config_error_on_write(f"--out {out}", REMEDY):
        if options.out is None:
            files.make_subfolder(out.parent)
        files.replace_bytes(out, encoded)
    print(f"{out}: {split}, step {step}, {sum(map(_size, rows))} samples")
    return 0


def _check_path(out: Path) -> None:
    """Check that the file can be written, before anything is computed. Creates its folder."""
    if out.suffix not in KINDS:
        raise ConfigError(f"--out {out}: the name must end with {' or '.join(KINDS)}.")
    with config_error_on_write(f"--out {out}", REMEDY):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            raise IsADirectoryError("this is a folder")
        if not os.access(out.parent, os.W_OK):
            raise PermissionError(f"{out.parent} can't be written to")


def _predict(reader: SavedRun, split: str | None) -> tuple[str, list[Row]]:
    """Return the name of the split, and the outputs of each batch by name."""
    evaluator = None
    for name in (split,) if split else ("test", "validation"):
        try:
            evaluator = reader.evaluator(name)
        except (KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"--split {name}: dataset({name!r}) raised "
                              f"{type(error).__name__}: {error}.") from error
        if evaluator is not None:
            break
    if evaluator is None:
        raise ConfigError(f"--split {name}: the task has no such data (dataset({name!r}) is None "
                          "or empty).")
    predict = method_of(reader.task, "predict")
    batches: list[tuple[Any, int]] = []
    for micro in evaluator.every_batch():
        batch = to_device(micro.batch, reader.world.device)
        with reader.evaluating(micro.spec.number):
            output = predict(reader.model, batch) if predict else record_first_call(
                reader.model, reader.task.loss, batch).output
        batches.append((_on_cpu(output, micro.samples), micro.samples))
    if not batches:
        raise ConfigError(f"--split {name}: the stream has no samples.")
    return name, _columns(batches, of_task=predict is not None)


class LeftOut(str):
    """The form of an output without a row for each sample, in its place: it is not kept."""

    __slots__ = ()


def _on_cpu(value: Any, samples: int, *, in_list: bool = False) -> Any:
    """An output with dense tensors on the CPU, also in place of arrays, and dicts in place of
    mappings, dataclasses and named tuples."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        is_kept = in_list or value.shape[:1] == (samples,)
        return value.detach().cpu().to_dense() if is_kept else LeftOut(str(tuple(value.shape)))
    if (named := named_fields(value)) is not None:
        return {key: _on_cpu(item, samples, in_list=in_list) for key, item in named.items()}
    if isinstance(value, list):
        return [_on_cpu(item, samples, in_list=True) for item in value]
    if isinstance(value, tuple):
        return tuple(_on_cpu(item, samples, in_list=in_list) for item in value)
    return value if in_list or value is None else LeftOut(type(value).__name__)


def _columns(batches: Sequence[tuple[Any, int]], *, of_task: bool) -> list[Row]:
    """The outputs of each batch by name, of those with an entry for each sample in all batches: a
    row of a tensor or an entry of a list."""
    origin, whole = "predict()" if of_task else "the model", _lists_of_samples(batches)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for output, samples in batches:
        leaves = output_leaves(output, whole=whole)
        if INDEX in leaves:
            raise ConfigError(f"--task: an output is named {INDEX}, which is the name of the "
                              "sample numbers in the file; give the task a method predict(model, "
                              "batch) that uses another name.")
        row = {name: leaf for name, leaf in leaves.items() if name in whole or (
            isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,))}
        others = {name: _form(leaf) for name, leaf in leaves.items() if name not in row}
        if others and (of_task or not row):
            _refuse(origin, others, samples)
        rows.append(row)
        left_out |= others
    written = set(rows[0]).intersection(*rows)
    left_out |= {key: "in some batches only" for row in rows for key in row.keys() - written}
    if not written:
        _refuse(origin, left_out, batches[-1][1])
    if left_out:
        Log().info("not written, since these outputs of the model have no row for each sample: "
                   + listed(f"{key} ({form})" for key, form in left_out.items()))
    return [{key: row[key] for key in rows[0] if key in written} for row in rows]


def _form(leaf: Any) -> str:
    """The shape of a tensor, or the type of another output."""
    if isinstance(leaf, LeftOut):
        return leaf
    return str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__


def _lists_of_samples(batches: Sequence[tuple[Any, int]]) -> set[str]:
    """Names of the lists that have an entry for each sample in all batches. A list of tensors which
    all have a row for each sample is a list of several outputs."""
    found = [{name: value for name, value in _lists(output) if len(value) == samples}
             for output, samples in batches]
    names = set(found[0]).intersection(*found)
    return {name for name in names if not all(
        isinstance(entry, Tensor) and entry.shape[:1] == (samples,)
        for (_, samples), lists in zip(batches, found, strict=True) for entry in lists[name])}


def _lists(output: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The lists of an output by name, those in its dicts too."""
    if isinstance(output, list):
        yield path or "output", output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from _lists(value, f"{path}.{key}" if path else str(key))


def _refuse(origin: str, others: Mapping[str, str], samples: int) -> NoReturn:
    forms = listed(f"{name} ({form})" for name, form in others.items()) or "None"
    raise ConfigError(
        f"--task: for a batch of {samples} samples {origin} returned {forms}, not a tensor with "
        "one row for each sample or a list with one entry for each; let a method predict(model, "
        "batch) of the task return such outputs alone, one or several by name.")


def _stacked(rows: list[Row]) -> dict[str, Tensor]:
    if others := [name for name, column in rows[0].items() if not isinstance(column, Tensor)]:
        raise ConfigError(f"--out: {listed(others)} is no tensor, and a safetensors file holds "
                          "only tensors; write to a .jsonl file.")
    try:
        tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]}
    except RuntimeError as error:
        raise ConfigError("--out: the outputs of the batches differ in size, and a safetensors "
                          f"file holds one tensor; write to a .jsonl file ({error}).") from error
    return {INDEX: torch.arange(sum(map(_size, rows))), **tensors}


def _lines(rows: list[Row]) -> Iterator[bytes]:
    index = 0
    for row in rows:
        for position in range(_size(row)):
            values = {name: _to_json(column[position]) for name, column in row.items()}
            yield (json.dumps({INDEX: index, **values}, allow_nan=False) + "\n").encode()
            index += 1


def _to_json(value: Any) -> Any:
    """A value of tensors, numbers, strings, lists and dicts as JSON, which has neither NaN nor
    infinity: they become null."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [*map(_to_json, value)]
    raise ConfigError(f"--task: the output for a sample has a {type(value).__name__}, which JSON "
                      "can't represent; give the task a method predict(model, batch) that returns "
                      "tensors, numbers, strings, lists and dicts of them.")


def _size(row: Row) -> int:
    return len(next(iter(row.values())))
