"""The training loop, on one screen."""

from __future__ import annotations

from trainer.boundary import is_due, stop, validate
from trainer.data.bad import refuse_copies
from trainer.parts import Parts
from trainer.product import finish
from trainer.recovery import face_row, face_skipped, ranks_agree
from trainer.start import start
from trainer.status import Phase


def train(run: Parts) -> dict[str, object]:
    """Collective. Train to the last step, from wherever the run is; returns the summary.

    Raises:
        StopRequested: a rank was asked to stop; the state of the step just made is saved.
    """
    start(run)
    face_row(run)
    progress, last, wanted = run.progress, run.intervals.total, False
    while True:
        step, every = progress.step, run.intervals
        owed = is_due(step, every.evaluate, last) and progress.validated < step
        save = wanted or is_due(step, every.checkpoint, last)
        if (owed or save or is_due(step, every.verify, last)) and not ranks_agree(run):
            continue  # with the state of an older step, at which they did
        if owed:
            validate(run)  # also the one that an earlier attempt owed
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
        wanted = "save" in result.sums.wishes
        if "stop" in result.sums.wishes:
            stop(run)
