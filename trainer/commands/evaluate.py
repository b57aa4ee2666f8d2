"""`python -m trainer evaluate RUN`: the metrics of a checkpoint, as the run itself logs them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer import flags
from trainer.errors import ConfigError
from trainer.log import Log
from trainer.reader import Reader, read

EPILOG = "Any flag of the run may follow and wins over its configuration, such as --device cpu."


def main(argv: Sequence[str]) -> int:
    """Print the metrics of the validation and the test set; 2: there is nothing to evaluate."""
    parser = argparse.ArgumentParser(
        prog="trainer evaluate", epilog=EPILOG, allow_abbrev=False,
        description="Evaluate a checkpoint of a run, which may be under way, on the validation "
        "and the test set: to the bits of what the run has logged of that step. Nothing is "
        "written.",
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    options, overrides = flags.split(parser, argv)
    try:
        reader = read(options.run, checkpoint=options.checkpoint, overrides=overrides)
        if reader.choice.compile:
            reader.model.compile()
        scores = evaluate(reader)
    except ConfigError as error:
        Log().error(str(error))
        return error.exit_code
    found = {"step": reader.weights.step, "averaged": bool(reader.weights.average), **scores}
    sys.stdout.write((json.dumps(found) if options.json else _table(found)) + "\n")
    return 0


def evaluate(reader: Reader) -> dict[str, Any]:
    """Split → "loss", the metrics and figures, "samples"; of the splits that the task has.

    Raises:
        ConfigError: it has none.
    """
    found = {}
    for split in ("validation", "test"):
        evaluator = reader.evaluator(split)
        scores = None if evaluator is None else evaluator()
        if scores is not None:
            found[split] = {"loss": scores.loss, **scores.metrics, "samples": scores.samples}
    if not found:
        raise ConfigError('--task: dataset("validation") and dataset("test") are None or empty; '
                          "there is nothing to evaluate.")
    return found


def _table(found: dict[str, Any]) -> str:
    lines = [f"step {found['step']}" + ", the average of the weights" * found["averaged"]]
    for split in ("validation", "test"):
        lines += [f"{split} {name} {value}" for name, value in found.get(split, {}).items()]
    return "\n".join(lines)
