"""`python -m trainer export RUN --to FOLDER`: export a model, and verify the exported file."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from trainer import rng
from trainer.config import command_line
from trainer.data import batch as batches
from trainer.data.batch import to_device
from trainer.distributed.torch_private import tree_leaves, tree_map
from trainer.errors import ConfigError, listed
from trainer.optim import precision
from trainer.run.saved_run import (
    ModelCall,
    SavedRun,
    config_error_on_write,
    find_first_call,
    load_weights,
    named_fields,
    open_saved_run,
    output_leaves,
)
from trainer.storage import files, layout, tensorfile
from trainer.task import Outcome, check_outcome
from trainer.telemetry.events import Log

SAFETENSORS = "model.safetensors"
FILES = {"safetensors": SAFETENSORS, "program": "model.pt2", "hf": "config.json"}
TOLERANCE = {"safetensors": 0.0, "program": 1e-4, "hf": 0.0}
"""Largest difference of an output, relative to max(1, the largest output). Loaded weights run the
same code; an exported program uses other operations."""
PROCESSORS = ("tokenizer", "processor", "image_processor", "feature_extractor")
"""Attributes of a task that `--format hf` writes beside the model, by their `save_pretrained`."""


def main(argv: Sequence[str]) -> int:
    """Export; exit code 1: the output of a file read back differs, 2: the export failed."""
    parser = command_line.saved_run_parser(
        "export", "Export the model of a checkpoint: its weights (safetensors, plain names) or a "
        "torch.export program of its forward in fp32, for batches of any size if the model allows "
        "it, or by save_pretrained (hf), with the task's tokenizer. "
        "Each file is read back and evaluated on a batch of the run's data; it is kept only "
        "if the output is the same. Exit code 0: it is; 1: it differs; 2: the export failed.")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--format", action="append", choices=list(TOLERANCE),
                        help="may repeat; default: safetensors")
    parser.add_argument("--tolerance", type=float, help="largest difference, relative to the "
                        "largest output and 1; default: 0 for safetensors, 1e-4 for a program")
    options, overrides = command_line.split(parser, argv)
    if {"hf", "safetensors"} <= {*(options.format or ())}:
        raise ConfigError(f"--format hf: it writes {SAFETENSORS} too; omit --format safetensors.")
    if options.tolerance is not None and not options.tolerance >= 0:
        raise ConfigError(f"--tolerance {options.tolerance:g}: use 0 or more.")
    reader = open_saved_run(options.run, checkpoint=options.checkpoint, overrides=overrides)
    example = _example(reader)
    if any((options.to / name).exists() for name in (layout.IDENTITY, layout.MANIFEST)):
        raise ConfigError(f"--to {options.to}: this is a run or a checkpoint, with a "
                          f"{SAFETENSORS} of its own; choose another folder.")
    with config_error_on_write(f"--to {options.to}", "choose a folder that can be written"):
        options.to.mkdir(parents=True, exist_ok=True)
        kinds = dict.fromkeys(options.format or ["safetensors"])
        kept = {kind: _export(reader, example, kind, options.to, TOLERANCE[kind] if
                              options.tolerance is None else options.tolerance) for kind in kinds}
        if found := {FILES[kind]: about for kind, about in kept.items() if about is not None}:
            files.replace_json(options.to / "export.json", {
                "run": str(options.run), "step": reader.weights.step,
                "averaged": bool(reader.weights.average),
                "task": command_line.task_path(reader.config.task), "files": found})
    return 0 if None not in kept.values() else 1


def _export(
    reader: SavedRun, example: Example, kind: str, folder: Path, tolerance: float
) -> dict[str, Any] | None:
    """Write a file and read it back; returns its description, or None if its output differs."""
    name = FILES[kind]
    with TemporaryDirectory(dir=folder, prefix=".") as aside:
        again, notes = WRITERS[kind](reader, example, Path(aside) / name)
        expected, found = _tensors(example.output(reader.model)), _tensors(again)
        where = folder if kind == "hf" else folder / name
        forms = [{f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
                 for tensors in (expected, found)]
        if other := forms[0] ^ forms[1]:
            Log().error(f"{where}: it isn't kept, since it computes other outputs than the model: "
                        f"only one of them has {listed(sorted(other))}.")
            return None
        difference = _difference(expected, found)
        summary = f"{where}: largest difference {difference:.3g}"
        if not difference <= tolerance:
            Log().error(f"{summary}, more than --tolerance {tolerance:g}: it isn't kept.")
            return None
        for path in Path(aside).iterdir():
            path.rename(folder / path.name)
    print(summary + "".join(f", {key} {notes[key]}" for key in notes))
    return {"difference": difference, "tolerance": tolerance, **notes}


@dataclass(frozen=True)
class Example:
    """What is computed with the model and with the one read back: its first call in the loss of a
    batch, or the loss, if that calls parts of the model only."""

    call: ModelCall | None
    loss: Callable[[nn.Module, Any], Outcome]
    batch: Any

    def output(self, model: Any) -> Any:
        """The output of a model. Each uses the same random keys: the model may sample."""
        rng.seed_all(0, rng.EVALUATE)
        with torch.no_grad():
            if self.call is not None:
                return model(*self.call.args, **self.call.kwargs)
            total, metrics = check_outcome(self.loss(model, batches.copy_of(self.batch)))
            return {"loss": total} | {name: torch.as_tensor(value)
                                      for name, (value, _) in metrics.items()}


def _example(reader: SavedRun) -> Example:
    """The example of the first batch of the data, in fp32, without a graph."""
    evaluator = next(found for split in ("validation", "test", "train")
                     if (found := reader.evaluator(split)) is not None)
    batch = to_device(next(iter(evaluator.every_batch())).batch, reader.world.device)
    with torch.no_grad():
        call = find_first_call(reader.model, reader.task.loss, batches.copy_of(batch))
    example = Example(call, reader.task.loss, batch)
    # The loss may wrap the call (in autocast, for example). The reference output comes from a call
    # outside of it, like the outputs that it is compared with.
    leaves = output_leaves(example.output(reader.model))
    others = [f"{name} ({type(leaf).__name__})" for name, leaf in leaves.items()
              if not isinstance(leaf, Tensor)]
    if len(others) == len(leaves):
        raise ConfigError("--task: the model's output has no tensor that could be compared, "
                          f"only {listed(others) or 'None'}.")
    if others:
        Log().info(f"not compared, since only tensors are: {listed(others)}")
    return example


def _write_safetensors(
    reader: SavedRun, example: Example, path: Path
) -> tuple[Any, dict[str, Any]]:
    weights = {name: value.cpu() for name, value in reader.model.state_dict().items()}
    files.replace_bytes(path, tensorfile.serialize(weights))
    model = reader.fresh_model()
    load_weights(model, tensorfile.load_tensors(path), str(path))
    return example.output(model), {}


def _write_program(reader: SavedRun, example: Example, path: Path) -> tuple[Any, dict[str, Any]]:
    if example.call is None:
        raise ConfigError("--format program: loss() doesn't call the model itself (model(…)), so "
                          "its arguments are unknown; use --format safetensors.")
    model, args, kwargs = reader.model, example.call.args, dict(example.call.kwargs)
    sizes = [leaf.shape[0] for leaf in tree_leaves((args, kwargs))
             if isinstance(leaf, Tensor) and leaf.dim()]
    batch_size = sizes[0] if sizes else 0

    def dynamic(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == batch_size
        return {0: torch.export.Dim("batch")} if batched else None

    named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    any_size = {name: tree_map(dynamic, value) for name, value in named.items()}
    failed: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its internals
        for shapes, batch in ((any_size, "of any size"), (None, f"of {batch_size}")):
            try:
                with model.register_forward_hook(lambda model, args, output: _plain(output)):
                    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
                program.example_inputs = None  # they are the user's data
                torch.export.save(program, path)
                return example.output(torch.export.load(path).module()), {"batch": batch}
            except OSError:
                raise
            except Exception as error:
                failed = error
    raise ConfigError(f"--format program: torch.export can't export this model: "
                      f"{type(failed).__name__}: {str(failed).strip().splitlines()[0]}; "
                      "export it as safetensors, or let the model return tensors only.") from failed


def _plain(output: Any) -> Any:
    """An output of tensors, numbers, tuples, lists and dicts, which a program can return without
    the classes of the model: dicts in place of named tuples and dataclasses, and None in place of
    other objects."""
    if (named := named_fields(output)) is not None:
        return {key: _plain(value) for key, value in named.items()}
    if isinstance(output, tuple | list):
        return [*map(_plain, output)] if isinstance(output, list) else (*map(_plain, output),)
    return output if isinstance(output, Tensor | int | float) else None


def _tensors(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by name: dense, on the CPU, with complex numbers as pairs."""
    dense = {name: leaf.detach().cpu().to_dense() for name, leaf in output_leaves(output).items()
             if isinstance(leaf, Tensor)}
    return {name: torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            for name, tensor in dense.items()}


def _difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two outputs, relative to max(1, largest value)."""
    worst = 0.0
    for name, tensor in left.items():
        if tensor.numel():
            a, b = tensor.double(), right[name].double()
            apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
            largest = max(1.0, float(a.nan_to_num(0.0, 0.0, 0.0).abs().max()))
            worst = max(worst, float(apart.nan_to_num(math.inf).max()) / largest)
    return worst


def _write_pretrained(reader: SavedRun, example: Example, path: Path) -> tuple[Any, dict[str, Any]]:
    model: Any = reader.model
    folder = path.parent
    parts: list[Any] = [model, *(getattr(reader.task, name, None) for name in PROCESSORS)]
    if not (hasattr(model, "save_pretrained") and hasattr(model, "from_pretrained")):
        raise ConfigError(f"--format hf: the model, a {type(model).__name__}, has no "
                          "save_pretrained and from_pretrained; use --format safetensors.")
    try:
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        again = type(model).from_pretrained(*_base(model), folder)
        attention = [getattr(getattr(part, "config", None), "_attn_implementation", None)
                     for part in (model, again)]
        if attention[0] != attention[1]:  # the files don't have it, and it decides the outputs
            again.set_attn_implementation(attention[0])
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(f"--format hf: saving a {type(model).__name__} and reading it back "
                          f"raised {type(error).__name__}: {error}. Use --format safetensors."
                          ) from error
    again = precision.place(again, reader.choice, reader.world.device).eval()
    return example.output(again), {"files": listed(sorted(p.name for p in folder.iterdir()))}


def _base(model: Any) -> list[Any]:
    """The first argument of `from_pretrained` of a model with adapters (peft): its base model."""
    if not hasattr(model, "get_base_model"):
        return []
    copied = copy.deepcopy(model)  # some adapters are layers inside of the base model
    return [copied.unload() if hasattr(copied, "unload") else copied.get_base_model()]


WRITERS = {"safetensors": _write_safetensors, "program": _write_program, "hf": _write_pretrained}
"""Format → what writes it and returns the output of the model read back, and notes."""
