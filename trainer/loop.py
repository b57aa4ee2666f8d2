"""The training loop, on one screen."""

from __future__ import annotations

from trainer.data.sample_errors import refuse_copies
from trainer.run.bad_steps import face_row, face_skipped, ranks_agree
from trainer.run.finish import finish
from trainer.run.run import Parts
from trainer.run.validation import is_due, stop, validate
from trainer.run.warmup import start
from trainer.telemetry.status import Phase


def train(run: Parts) -> dict[str, object]:
    """Collective. Train from the current position to the last step.

    Returns:
        the contents of summary.json.

    Raises:
        StopRequested: a rank was asked to stop; the last complete step is saved.
    """
    start(run)
    face_row(run)
    progress, last, save_requested = run.progress, run.intervals.total, False
    while True:
        step, intervals = progress.step, run.intervals
        validation_due = is_due(step, intervals.evaluate, last) and progress.validated < step
        save = save_requested or is_due(step, intervals.checkpoint, last)
        check_due = validation_due or save or is_due(step, intervals.verify, last)
        if check_due and not ranks_agree(run):
            continue  # rolled back to an older step
        if validation_due:
            validate(run)  # includes a validation that an earlier attempt did not finish
        if run.state.best.has_waited(run.config.eval.patience):
            last = step
        if save or step >= last:
            run.checkpoint.save("periodic")
        if step >= last:
            return finish(run)

        run.status.enter(Phase.TRAIN)
        result = run.step(run.loader.window(), wishes=run.wishes)
        if result is None:
            run.loader.next_epoch()
            continue
        run.status.complete_step(progress.step)
        if not result.skipped:
            run.state.meter.add(result.sums.loss, result.sums.count)
        times = run.metrics.step(result, waited_s=run.loader.waited_s)
        run.timing.add(result.step, times, samples=result.sums.samples,
                       held_s=run.checkpoint.held_s)
        if result.fault:
            face_skipped(run, result)
        if result.sums.replaced:
            refuse_copies(progress.replaced, progress.step * run.config.batch.global_size)

        if result.sums.wishes:
            run.heed_saves(result.sums.wishes)
        save_requested = "save" in result.sums.wishes
        if "stop" in result.sums.wishes:
            stop(run)
