"""The training loop, on one screen."""

from __future__ import annotations

from trainer.data.sample_errors import check_replaced_share
from trainer.run.bad_steps import handle_bad_streak, replicas_match, report_skipped_step
from trainer.run.finish import finish
from trainer.run.run import Run
from trainer.run.validation import is_due, stop, validate
from trainer.run.warmup import start
from trainer.telemetry.status import Phase


def train(run: Run) -> dict[str, object]:
    """Collective. Train from the current position to the last step.

    Returns:
        the contents of summary.json.

    Raises:
        StopRequested: a rank was asked to stop; the last complete step is saved.
    """
    start(run)
    handle_bad_streak(run)
    progress, last, save_requested = run.progress, run.intervals.total, False
    while True:
        step, intervals = progress.step, run.intervals
        validation_due = is_due(step, intervals.evaluate, last) and progress.validated < step
        save = save_requested or is_due(step, intervals.checkpoint, last)
        check_due = validation_due or save or is_due(step, intervals.verify, last)
        if check_due and not replicas_match(run):
            continue  # rolled back to an older step
        if validation_due:
            validate(run)  # includes a validation that an earlier attempt did not finish
        if run.state.best.patience_is_exhausted(run.config.eval.patience):
            last = step
        if save or step >= last:
            run.checkpoint.save("periodic")
        if step >= last:
            return finish(run)

        run.status.enter(Phase.TRAIN)
        result = run.step(run.loader.window(), requests=run.requests)
        if result is None:
            run.loader.next_epoch()
            continue
        run.status.complete_step(progress.step)
        if not result.skipped:
            run.state.meter.add(result.sums.loss, result.sums.count)
        times = run.metrics.step(result, waited_s=run.loader.waited_s)
        run.timing.add(result.step, times, samples=result.sums.samples,
                       save_stall_s=run.checkpoint.save_stall_s)
        if result.skip_reason:
            report_skipped_step(run, result)
        if result.sums.replaced:
            check_replaced_share(progress.replaced, progress.step * run.config.batch.global_size)

        if result.sums.requests:
            run.acknowledge_save(result.sums.requests)
        save_requested = "save" in result.sums.requests
        if "stop" in result.sums.requests:
            stop(run)
