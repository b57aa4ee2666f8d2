"""End of a run: choice of the best weights, their test metrics, and the summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from trainer.checkpoint.manifest import write_listed
from trainer.checkpoint.progress import BestTracker
from trainer.config.compatibility import settings
from trainer.errors import ConfigError, NonFinite, StopRequested
from trainer.run import run_dir
from trainer.run.evaluate import Scores
from trainer.run.memory import memory_figures
from trainer.run.run import Run
from trainer.storage import files, layout, tensorfile
from trainer.storage.files import display_path
from trainer.telemetry.classification import per_class
from trainer.telemetry.metrics import read_metrics
from trainer.telemetry.status import Phase

FEW = 5
"""Number of losses of the first and the last steps that `--overfit` compares."""


def best_rule(rule: str, figures: Iterable[str]) -> tuple[str, str]:
    """The metric that selects the best weights among those of a validation, and "max" or "min"."""
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
    """Update the best value with the line of a validation; return whether it improved. Only an
    improvement by `min_delta` resets the patience."""
    name, direction = best_rule(
        rule, [key for key in line if key.startswith("val_") and key != "val_table"])
    best.set_rule(name, direction)
    value = math.nan if line[name] is None else line[name]
    best.wait(value, min_delta)
    improved = not math.isnan(value) and best.improves(value)
    if improved:
        best.take(value, step)
    return improved


def finish(run: Run) -> dict[str, Any]:
    """Collective. Evaluate the best weights on the test set, and write model and summary."""
    world, log, path = run.context.world, run.context.log, run.context.path
    config = run.context.config
    progress, best = run.state.progress, run.state.best
    run.guard.checkpoint.settle()  # before the phase changes: survivors can still save this step
    run.context.status.enter(Phase.FINISH)
    if progress.bad and not progress.updates:
        raise NonFinite(f"none of the {progress.step} steps gave an update: loss or gradient were "
                        "unusable. Correct the cause, and start again with another --run-dir")
    weights, scores = _load_best(run), None
    if run.test is not None:
        with world.long_timeout():
            scores = run.test()
        if scores is None:
            raise StopRequested(
                f"stopped on request during the test of the best weights; all {progress.step} "
                "steps are saved, and the same command finishes the run")
    summary = _summary(run, weights, scores)
    if config.overfit is not None:
        judged = world.fail_together(partial(_judge_overfit, run) if world.is_main else lambda: {})
        summary["overfit"] = world.broadcast_json(judged)
    figures = {} if best.value is None else {f"final/best_{best.metric}": best.value}
    if scores is not None:
        figures |= {"final/test_loss": scores.loss}
        figures |= {f"final/test_{n}": v for n, v in scores.metrics.items()}
    chosen = settings(config)
    plain = {name: chosen[name] for name, _, change in config.leaves() if change != "ignored"}
    run.folder.metrics.finish(plain, figures, progress.step)
    if run.recorders.pictures is not None:
        run.recorders.pictures.save_animation(progress.step)
    world.fail_together(partial(_write, run, summary))
    log.event("end", attempts=summary["attempts"])
    if run.folder.mirror is not None:
        run.folder.mirror.offer_product(progress.step)
    for text in run.guard.faults.unfired():
        log.warning(f"--inject {text}: the injected fault was never reached")
    for line in run_dir.closing_lines(summary, display_path(path)):
        log.info(line)
    run_dir.check_overfit(summary)
    return summary


def _judge_overfit(run: Run) -> dict[str, Any]:
    """Whether the loss fell: each of the last losses is below each of the first ones, which noise
    does not do."""
    run.folder.metrics.sync()
    losses = [line["loss"] for line in read_metrics(run.context.path / layout.METRICS)
              if line.get("loss") is not None]
    few = max(1, min(FEW, len(losses) // 2))
    return {"first": losses[0], "last": losses[-1], "steps": len(losses),
            "fell": max(losses[-few:]) < min(losses[:few])}


def _write(run: Run, summary: dict[str, Any]) -> None:
    """Write model and summary. The summary marks the run as complete, so it is written last."""
    path = run.context.path
    run.folder.metrics.sync()
    if run.context.world.writes_run_dir:
        weights = run.state.export_weights()

        def write() -> None:
            entry = write_listed(path / layout.PRODUCT, tensorfile.serialize(weights))
            files.replace_json(path / layout.SUMMARY, {**summary, "product": entry})

        files.when_not_full(write, run.context.log.warning)


def _load_best(run: Run) -> str:
    """Collective. Load the best weights into the model; returns what they are."""
    best, last = run.state.best, run.state.progress.step
    chosen = best.step or last
    why = f"which have the best {best.metric}" if best.value is not None else "the last step"
    if chosen != last and not run.guard.checkpoint.load_model(chosen):
        run.guard.checkpoint.end_for_damaged_best(chosen)
        run.context.log.warning(f"the best weights, of step {chosen}, are lost: no valid "
                                "checkpoint holds them; those of the last step are used instead")
        chosen, why = last, "the last step"
    return f"the {'averaged ' * (run.state.ema is not None)}weights of step {chosen}, {why}"


def _summary(run: Run, weights: str, scores: Scores | None) -> dict[str, Any]:
    state, task = run.state, run.context.config.task
    progress, best, last = state.progress, state.best, state.progress.step
    return {
        "step": last, "updates": progress.updates, "skipped": progress.skipped,
        "replaced": progress.replaced,
        "best": {"step": best.step or last, "metric": best.metric or None, "value": best.value},
        "test": None if scores is None else {
            "loss": scores.loss, "samples": scores.samples, **scores.metrics},
        "test_classes": None if scores is None else classes(
            scores.table, getattr(task, "class_names", ())),
        "model.safetensors": weights,
        "final_weights": f"{layout.CHECKPOINTS}/{layout.step_name(last)}/{layout.MODEL}",
        "attempts": run.folder.identity.attempt + 1,
        "stopped_early": last < run.setup.intervals.total,
        "planned_steps": run.setup.intervals.total,
        "save_waits": run.guard.checkpoint.waits,
        "memory": memory_figures(state.model, state.optimizer, run.step.facts.activations_mb)}


def classes(table: Tensor | None, names: Sequence[str]) -> dict[str, dict[str, float]] | None:
    """Precision, recall, F1 and IoU of each class by name; None without a confusion matrix."""
    if table is None or table.shape[1:] not in ((len(table),), (2, 2)):
        return None
    found = {name: values.tolist() for name, values in per_class(table).items()}
    return {names[c] if c < len(names) else str(c): {n: v[c] for n, v in found.items()}
            for c in range(len(table))}
