"""`python -m trainer predict RUN`: write the outputs of a checkpoint's model to a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from trainer.config import command_line
from trainer.data.batch import to_device
from trainer.errors import ConfigError
from trainer.run.saved_run import SavedRun, config_error_on_write, open_saved_run, record_first_call
from trainer.storage import files, layout
from trainer.telemetry.events import writable

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
    reader = open_saved_run(options.run, checkpoint=options.checkpoint, overrides=overrides)
    split, rows = _predict(reader, options.split)
    step = reader.weights.step
    name = f"{split}-{layout.step_name(step)}.safetensors"
    out = options.out or options.run / "predictions" / name
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
    rows = []
    for micro in evaluator.every_batch():
        batch = to_device(micro.batch, reader.world.device)
        with reader.evaluating(micro.spec.number):
            output = predict(reader.model, batch) if predict else record_first_call(
                reader.model, reader.task.loss, batch).output
        rows.append(_named(output, micro.samples))
    if not rows:
        raise ConfigError(f"--split {name}: the stream has no samples.")
    return name, rows


def _named(output: Any, samples: int) -> dict[str, Tensor]:
    """Return the outputs of a batch by name, one row for each sample, on the CPU."""
    if isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        named = {f"output.{number}": value for number, value in enumerate(output)}
    else:
        named = {"output": output}
    if INDEX in named:
        raise ConfigError(f"--task: an output is named {INDEX}, which is the name of the sample "
                          "numbers in the file; give the task a method predict(model, batch) that "
                          "uses another name.")
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
            form = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"--task: {name} of a batch of {samples} samples is {form}, not a "
                              "tensor with one row for each sample; give the task a method "
                              "predict(model, batch) that returns one, or several by name.")
    return {name: value.detach().cpu() for name, value in named.items()}


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
