"""`python -m trainer predict RUN`: write the outputs of a checkpoint's model to a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save
from torch import Tensor

from trainer.config import command_line
from trainer.data.batch import to_device
from trainer.errors import ConfigError, listed
from trainer.run.saved_run import (
    SavedRun,
    config_error_on_write,
    open_saved_run,
    output_leaves,
    record_first_call,
)
from trainer.storage import files, layout
from trainer.telemetry.events import Log, writable

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
        "each sample, and the outputs may differ in size.")
    parser.add_argument("--split", help="any split that the task's dataset() accepts; default: "
                        "test, or validation if there is no test set")
    parser.add_argument("--out", type=Path, metavar="FILE.safetensors|FILE.jsonl",
                        help="default: RUN/predictions/SPLIT-step-N.safetensors")
    options, overrides = command_line.split(parser, argv)
    if options.out is not None:
        _check_path(options.out)
    elif isinstance(options.run, str):
        raise ConfigError(f"--out: the predictions of {options.run} need a file on this machine; "
                          "add --out predictions.safetensors.")
    reader = open_saved_run(options.run, checkpoint=options.checkpoint, overrides=overrides)
    split, rows = _predict(reader, options.split)
    step = reader.weights.step
    name = f"{split}-{layout.step_name(step)}.safetensors"
    out = options.out or Path(options.run, "predictions", name)
    origin = {"run": writable(str(options.run)), "step": str(step), "split": split}
    encoded = _lines(rows) if out.suffix == ".jsonl" else [save(_stacked(rows), origin)]
    with config_error_on_write(f"--out {out}", REMEDY):
        out.parent.mkdir(parents=True, exist_ok=True)
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


def _predict(reader: SavedRun, split: str | None) -> tuple[str, list[dict[str, Tensor]]]:
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
    predict = getattr(reader.task, "predict", None)
    rows: list[dict[str, Tensor]] = []
    left_out: dict[str, str] = {}
    for micro in evaluator.every_batch():
        batch = to_device(micro.batch, reader.world.device)
        with reader.evaluating(micro.spec.number):
            output = predict(reader.model, batch) if predict else record_first_call(
                reader.model, reader.task.loss, batch).output
        found, others = _sort_out(output, micro.samples)
        if others and (predict or not found):
            _refuse("predict()" if predict else "the model", others, micro.samples)
        rows.append(found)
        left_out |= others
    if not rows:
        raise ConfigError(f"--split {name}: the stream has no samples.")
    written = set(rows[0]).intersection(*rows)
    left_out |= {key: "in some batches only" for row in rows for key in row.keys() - written}
    if not written:
        _refuse("the model", left_out, micro.samples)
    if left_out:
        Log().info("not written, since these outputs of the model have no row for each sample: "
                   + listed(f"{key} ({form})" for key, form in left_out.items()))
    return name, [{key: row[key] for key in rows[0] if key in written} for row in rows]


def _sort_out(output: Any, samples: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the outputs of a batch with one row for each sample by name, on the CPU, and the form
    of the others."""
    leaves = output_leaves(output)
    if INDEX in leaves:
        raise ConfigError(f"--task: an output is named {INDEX}, which is the name of the sample "
                          "numbers in the file; give the task a method predict(model, batch) that "
                          "uses another name.")
    found = {name: leaf.detach().cpu() for name, leaf in leaves.items()
             if isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,)}
    return found, {
        name: str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__
        for name, leaf in leaves.items() if name not in found}


def _refuse(origin: str, others: Mapping[str, str], samples: int) -> NoReturn:
    forms = listed(f"{name} ({form})" for name, form in others.items()) or "None"
    raise ConfigError(
        f"--task: for a batch of {samples} samples {origin} returned {forms}, not a tensor with "
        "one row for each sample; give the task a method predict(model, batch) that returns one, "
        "or several by name.")


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]}
    except RuntimeError as error:
        raise ConfigError("--out: the outputs of the batches differ in size, and a safetensors "
                          f"file holds one tensor; write to a .jsonl file ({error}).") from error
    return {INDEX: torch.arange(sum(map(_size, rows))), **tensors}


def _lines(rows: list[dict[str, Tensor]]) -> Iterator[bytes]:
    index = 0
    for row in rows:
        for position in range(_size(row)):
            values = {name: _to_json(value[position].tolist()) for name, value in row.items()}
            yield (json.dumps({INDEX: index, **values}, allow_nan=False) + "\n").encode()
            index += 1


def _to_json(numbers: Any) -> Any:
    """Replace NaN and infinity by None: JSON has neither."""
    if isinstance(numbers, list):
        return [_to_json(number) for number in numbers]
    return numbers if math.isfinite(numbers) else None


def _size(row: dict[str, Tensor]) -> int:
    return len(next(iter(row.values())))
