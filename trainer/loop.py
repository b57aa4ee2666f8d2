"""The training loop, on one screen."""

from __future__ import annotations

from trainer.data.sample_errors import check_replaced_share
from trainer.run.bad_steps import handle_bad_streak, replicas_match, report_skipped_step
from trainer.run.finish import finish
from trainer.run.prepare import is_due
from trainer.run.run import Run
from trainer.run.validation import save_and_stop, validate
from trainer.telemetry.status import Phase


def train(run: Run) -> dict[str, object]:
    """Collective. Train from the current position to the last step; returns the summary.

    Raises:
        StopRequested: a rank was asked to stop; the last complete step is saved.
    """
    config, intervals, status = run.context.config, run.setup.intervals, run.context.status
    state, loader, guard, progress = run.state, run.loader, run.guard, run.state.progress
    last, requests = intervals.total, frozenset[str]()
    guard.checkpoint.allocate()
    handle_bad_streak(run)
    while True:
        step = progress.step
        validation_due = progress.validated < step and (
            "validate" in requests or is_due(step, intervals.evaluate, last))
        save = "save" in requests or state.ends_cycle or is_due(step, intervals.checkpoint, last)
        check_due = validation_due or save or is_due(step, intervals.verify, last)
        if check_due and not replicas_match(run):
            continue  # rolled back to an older step
        if validation_due:
            validate(run)  # includes a validation that an earlier attempt did not finish
        if state.best.patience_is_exhausted(config.eval.patience):
            last = step
        if save or step >= last:  # patience may have moved `last`
            guard.checkpoint.save("periodic")
        if step >= last:
            return finish(run)

        status.enter(Phase.TRAIN)
        result = run.step(loader.window(), requests=guard.requests)
        if result is None:
            loader.next_epoch()
            continue
        status.complete_step(progress.step)
        if not (result.skipped or result.turn):  # a mean over turns has no meaning
            state.meter.add(result.sums.loss, result.sums.count)
        run.recorders.step(result, waited_s=loader.waited_s,
                           blocked_s=guard.checkpoint.blocked_s)
        if result.skip_reason:
            report_skipped_step(run, result)
        if result.sums.replaced:
            check_replaced_share(progress.replaced, progress.step * config.batch.global_size)

        if requests := result.sums.requests:
            guard.acknowledge_save(requests)
        if "stop" in requests:
            save_and_stop(run)
