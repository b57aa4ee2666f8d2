"""`python -m trainer [RECIPE] … --dry-run`: a few steps of the run in a temporary folder, through
everything that a long run does later: stop, save, restore, validation, test, export."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands import export
from trainer.commands.library import train_in_process
from trainer.commands.scratch_run import in_scratch_folder
from trainer.config.fields import Duration
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.storage import layout
from trainer.storage.records import read_json
from trainer.telemetry.events import read_events
from trainer.telemetry.metrics import primary_metric, read_metrics

FLAG = "--dry-run"
STEPS = 3
"""Steps of a dry run without --steps."""
BATCHES = 4
"""Batches of its validation; the test uses all."""


def main(argv: Sequence[str]) -> int:
    """Walk through the run and report each part; exit code 1: the exported file differs. An error
    of the run is raised as it is."""
    arguments = [argument for argument in argv if argument != FLAG]
    with in_scratch_folder(arguments, FLAG) as config:
        given = any(argument.partition("=")[0] == "--steps" for argument in arguments)
        steps = config.steps if given and config.steps is not None else STEPS
        if steps < 2:
            raise ConfigError(f"--steps {steps}: {FLAG} stops after the first step and continues; "
                              "use 2 or more, or omit --steps.")
        config = dataclasses.replace(
            config, steps=steps, epochs=None, overfit=None,
            eval=dataclasses.replace(config.eval, every=Duration(0), every_s=0.0, batches=BATCHES,
                                     patience=0, min_delta=0.0))
        print(f"{FLAG}: {steps} steps in a temporary folder, of which nothing is kept")
        return _walk(config, Path(str(config.run)), steps)


def _walk(config: Config[Any], run: Path, steps: int) -> int:
    with _timed("start, checks, step 1, stop on request") as told:
        with contextlib.suppress(SystemExit):  # code 75, as after SIGTERM
            train_in_process(dataclasses.replace(config, inject=("term:step=1",)))
        told.append(_saved(run))
    with _timed(f"restore, steps 2 to {steps}, validation, test") as told:
        train_in_process(config)
        summary = read_json(run / layout.SUMMARY) or {}
        restored = [event["at_step"] for event in read_events(run / layout.EVENTS)
                    if event["event"] == "restore"]
        told += [f"continued from step {restored[-1]}", _saved(run), *_scores(run, summary)]
    with _timed("export") as told, contextlib.redirect_stdout(io.StringIO()) as output:
        code = export.main([str(run), "--to", str(run.parent / "export"),
                            "--checkpoint", "last", "--device", config.device])
        told.append(output.getvalue().strip().rpartition(": ")[2] or "differs")
    print("all of it works; train with the same command without " + FLAG if code == 0 else
          "the exported weights differ from the model")
    return code


@contextlib.contextmanager
def _timed(part: str) -> Iterator[list[str]]:
    """Print a part with its time, and what the block appends to the list."""
    begun, told = time.perf_counter(), list[str]()
    try:
        yield told
    except BaseException:
        print(f"  failed  {part}")
        raise
    print(f"  ok      {part} ({time.perf_counter() - begun:.1f} s): {', '.join(told)}")


def _saved(run: Path) -> str:
    save = [event for event in read_events(run / layout.EVENTS) if event["event"] == "save"][-1]
    return f"saved {save['bytes']:,} bytes at step {save['at_step']} in {save['seconds']:.2f} s"


def _scores(run: Path, summary: Mapping[str, Any]) -> Iterator[str]:
    """The scores of the validation and of the test, or that there are none."""
    lines = [line for line in read_metrics(run / layout.METRICS) if "val_loss" in line]
    test = summary.get("test") or {}
    scores = {"validation": {name.removeprefix("val_"): value for name, value in lines[-1].items()
                             if name.startswith("val_")} if lines else {}, "test": test}
    for split, found in scores.items():
        chosen = ["loss", primary_metric(found) or "loss"]
        shown = [f"{name} {found[name]:.4g}" for name in dict.fromkeys(chosen)
                 if isinstance(found.get(name), int | float)]
        yield f"{split} {' '.join(shown)}" if found else f"no {split} data"
