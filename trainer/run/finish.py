"""End of a run: choice of the best weights, their test metrics, and the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from trainer.checkpoint.progress import BestTracker
from trainer.checkpoint.train_state import MODEL
from trainer.config.compatibility import settings
from trainer.errors import ConfigError, NonFinite, StopRequested
from trainer.run import run_dir
from trainer.run.run import Run
from trainer.storage import files, layout, tensorfile
from trainer.storage.files import display_path
from trainer.telemetry.classification import per_class
from trainer.telemetry.status import Phase


def best_rule(rule: str, figures: Iterable[str]) -> tuple[str, str]:
    """Resolve a rule to the metric that selects the best weights, and "max" or "min".

    Args:
        rule: NAME:max, NAME:min, or auto.
        figures: names of the metrics of a validation.

    Raises:
        ConfigError: the validation does not compute the metric.
    """
    known = sorted(figures)
    if rule == "auto":
        rule = "val_accuracy:max" if "val_accuracy" in known else "val_loss:min"
    name, _, direction = rule.rpartition(":")
    if name not in known:
        raise ConfigError(f"--eval.best {rule}: the validation does not compute {name}; it "
                          f"computes {', '.join(known)}.")
    return name, direction


def update_best(
    rule: str, best: BestTracker, line: dict[str, Any], step: int, min_delta: float = 0.0
) -> bool:
    """Update the best value with a validation; return whether it improved.

    Args:
        line: the validation's line of metrics.jsonl.
        min_delta: smallest improvement that resets the patience.
    """
    name, direction = best_rule(
        rule, [key for key in line if key.startswith("val_") and key != "val_table"])
    best.set_rule(name, direction)
    value = line[name]
    best.wait(math.nan if value is None else value, min_delta)
    if value is None or not best.improves(value):
        return False
    best.take(value, step)
    return True


def finish(run: Run) -> dict[str, Any]:
    """Collective. Evaluate the best weights on the test set, and write model and summary."""
    run.checkpoint.settle()  # before the phase changes: survivors can still save this step
    run.status.enter(Phase.FINISH)
    best, last = run.state.best, run.progress.step
    if run.progress.bad and not run.progress.updates:
        raise NonFinite(f"none of the {last} steps gave an update, because all had an unusable "
                        "loss or gradient. Correct the cause, and start again with another "
                        "--run-dir")
    chosen = best.step or last
    is_best = best.value is not None
    if chosen != last and not run.checkpoint.load_model(chosen):
        run.log.warning(f"the best weights, of step {chosen}, are lost: no valid checkpoint holds "
                        "them any more; the weights of the last step are used instead")
        chosen, is_best = last, False
    scores = None
    if run.test is not None:
        with run.world.long_timeout():
            scores = run.test()
        if scores is None:
            raise StopRequested("stopped on request during the test of the best weights; all "
                                f"{last} steps are saved, and the same command finishes the run")
    summary: dict[str, Any] = {
        "step": last,
        "updates": run.progress.updates,
        "skipped": run.progress.skipped,
        "replaced": run.progress.replaced,
        "best": {"step": best.step or last, "metric": best.metric or None, "value": best.value},
        "test": None if scores is None else {
            "loss": scores.loss, "samples": scores.samples, **scores.metrics},
        "test_classes": None if scores is None else classes(
            scores.table, getattr(run.config.task, "class_names", ())),
        "model.safetensors": f"the {'averaged ' * (run.state.ema is not None)}weights of step "
        f"{chosen}"
        + (f", which have the best {best.metric}" if is_best else ", the last step"),
        "final_weights": f"{layout.CHECKPOINTS}/{layout.step_name(last)}/{MODEL}",
        "attempts": run.identity.attempt + 1,
        "stopped_early": last < run.intervals.total,
        "save_waits": run.checkpoint.waits,
        "memory": run.memory.figures(run.state.model, run.state.optimizer),
    }  # fmt: skip
    figures = {} if best.value is None else {f"final/best_{best.metric}": best.value}
    if scores is not None:
        figures |= {"final/test_loss": scores.loss}
        figures |= {f"final/test_{n}": v for n, v in scores.metrics.items()}
    run.metrics.finish(settings(run.config), figures, last)
    if run.pictures is not None:
        run.pictures.save_animation(last)
    error = None
    try:
        _write(run, summary)
    except OSError as problem:
        error = problem
    run.world.raise_on_all_ranks(error)
    run.log.event("end", attempts=summary["attempts"])
    for text in run.faults.unfired():
        run.log.warning(f"--inject {text}: the injected fault was never reached")
    for line in run_dir.closing_lines(summary, display_path(run.path)):
        run.log.info(line)
    return summary


def classes(table: Tensor | None, names: Sequence[str]) -> dict[str, dict[str, float]] | None:
    """Precision, recall, F1 and IoU of each class by name; None without a confusion matrix."""
    if table is None or table.shape[1:] not in ((len(table),), (2, 2)):
        return None
    found = {name: values.tolist() for name, values in per_class(table).items()}
    return {names[c] if c < len(names) else str(c): {n: v[c] for n, v in found.items()}
            for c in range(len(table))}


def _write(run: Run, summary: dict[str, Any]) -> None:
    """Write model and summary. The summary marks the run as complete, so it is written last."""
    run.metrics.sync()
    if run.world.writes_run_dir:
        weights = run.state.export_weights()
        files.replace_bytes(run.path / layout.PRODUCT,
                            tensorfile.serialize({n: t.cpu() for n, t in weights.items()}))
        files.replace_json(run.path / layout.SUMMARY, summary)
