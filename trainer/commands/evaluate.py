"""`python -m trainer evaluate RUN`: the metrics of a checkpoint, as the run logs them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainer.config import command_line
from trainer.errors import ConfigError
from trainer.optim import precision
from trainer.run.saved_run import open_saved_run
from trainer.task import splits_of


def main(argv: Sequence[str]) -> int:
    """Print the metrics of the validation and the test set; exit code 2 if it has neither."""
    parser = command_line.saved_run_parser(
        "evaluate", "Evaluate a checkpoint of a run on the validation and the test set. The result "
        "is bitwise equal to what the run logs for that step. The run may still be training; "
        "nothing is written.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = command_line.split(parser, argv)
    reader = open_saved_run(options.run, checkpoint=options.checkpoint, overrides=overrides)
    precision.compile_model(reader.model, reader.choice, reader.config.numerics)
    step, averaged, found = reader.weights.step, bool(reader.weights.average), {}
    _, validation, test, *named = splits_of(reader.task)
    for split in (validation, *named, test):
        evaluator = reader.evaluator(split)
        scores = None if evaluator is None else evaluator()
        if scores is not None:
            found[split] = {"loss": scores.loss, **scores.metrics, "samples": scores.samples}
    if not found:
        raise ConfigError('--task: dataset("validation") and dataset("test") are None or empty; '
                          "there is nothing to evaluate.")
    if options.json:
        print(json.dumps({"step": step, "averaged": averaged, **found}))
        return 0
    print(f"step {step}" + ", the average of the weights" * averaged)
    for split, values in found.items():
        for name, value in values.items():
            print(f"{split} {name} {value}")
    return 0
