"""Check a `Task` before training, in a test of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trainer.commands.library import process_settings_restored, resolve_task
from trainer.commands.scratch_run import next_step, silent, started
from trainer.config.fields import Duration
from trainer.config.schema import Batch, Config, Data, Eval
from trainer.data.sample_errors import summarize_exception
from trainer.errors import TrainerError
from trainer.run.bad_steps import report_skipped_step
from trainer.run.startup_checks import is_unordered
from trainer.run.trial import OTHER_LOSS, UNCHECKED
from trainer.telemetry.events import Log

BATCHES = 2
"""Batches of each validation set that are evaluated."""


class _Warnings(Log):
    """Keeps warnings in place of showing them."""

    def __init__(self) -> None:
        super().__init__(level="error")
        self.found: list[str] = []

    def warning(self, text: str) -> None:
        self.found.append(text)


def check_task(task: Any, *, batch_size: int = 4) -> None:
    """Train the first steps of a task on the CPU, in a temporary folder, and report what a run
    refuses or warns about.

    This checks that samples and the states of a stream are reproducible; that the loss is finite
    and a sum, as its metrics and gradients are; that gradients reach every trainable parameter;
    that validation works; and that no result depends on state that a checkpoint doesn't contain.

    Args:
        task: an instance of the task.
        batch_size: samples per micro-batch; a step takes two.

    Raises:
        AssertionError: lists the problems, one sentence each.
    """
    assert not isinstance(task, type), f"give an instance: check_task({task.__name__}())"
    log, cause = _Warnings(), None
    try:
        with process_settings_restored(), tempfile.TemporaryDirectory() as folder:
            _train(task, batch_size, Path(folder), log)
    except Exception as error:
        cause = error
        log.found.append(str(error).removeprefix("--task: ") if isinstance(error, TrainerError)
                         else f"its first steps raised {summarize_exception(error)}")
    problems = [text for text in dict.fromkeys(log.found)
                if UNCHECKED not in text and OTHER_LOSS not in text]
    if problems:
        number = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise AssertionError(
            "\n- ".join([f"{type(task).__name__} has {number}:", *problems])) from cause


def _train(task: Any, batch_size: int, folder: Path, log: Log) -> None:
    off = Duration(0)
    config = silent(resolve_task(Config(
        task=task, device="cpu", eval=Eval(every=off, batches=BATCHES),
        batch=Batch(global_size=2 * batch_size, micro_size=batch_size),
        data=Data(drop_last="off", workers=0))), folder)
    with started(config, log, steps=99) as run:
        for split in run.setup.data:
            if is_unordered(run.setup, split, config):
                log.warning(f'samples of dataset("{split}") differ between two data sets created '
                            "one after the other: a restarted run would train on other data.")
        for _ in range(run.step.computes.two_updates + 1):  # then the first samples come again
            if (result := next_step(run)).skipped:
                return report_skipped_step(run, result)
        for evaluator in run.validations.values():
            evaluator()
