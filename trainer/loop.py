"""The training loop, on one screen."""

from __future__ import annotations

from trainer.data.bad import refuse_copies
from trainer.errors import StopRequested
from trainer.metrics import validation_line
from trainer.parts import Parts
from trainer.product import choose_best, finish
from trainer.recovery import face_skipped, ranks_agree
from trainer.start import start


def train(run: Parts) -> dict[str, object]:
    """Collective. Train to the last step, from wherever the run is; returns the summary.

    Raises:
        StopRequested: a rank was asked to stop; the state of the step just made is saved.
    """
    start(run)
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

        run.log.phase = "train"
        result = run.step(run.loader.window(), wishes=run.wishes)
        if result is None:
            run.loader.next_epoch()
            continue
        run.log.stepped(progress.step)
        if not result.skipped:
            run.state.meter.add(result.sums.loss, result.sums.count)
        run.metrics.step(result, waited_s=run.loader.waited_s)
        face_skipped(run, result)
        refuse_copies(progress.replaced, progress.step * run.config.batch.global_size)

        run.heed_saves(result.sums.wishes)
        wanted = "save" in result.sums.wishes
        if "stop" in result.sums.wishes:
            ranks_agree(run)
            run.checkpoint.save("stop")
            run.checkpoint.settle()
            raise StopRequested(f"stopped on request after step {progress.step}; "
                                "the same command goes on from there")


def validate(run: Parts) -> None:
    """Collective. Validate, and save where the weights are the best so far."""
    if run.validate is None:
        return
    run.log.phase = "evaluate"
    with run.world.patient():
        scores = run.validate()
    step = run.progress.step
    line = validation_line(step, scores, run.state.meter.take_mean())
    run.metrics.validation(line)
    run.progress.validated = step
    run.draw()
    if choose_best(run.config.eval.best, run.state.best, line, step):
        run.checkpoint.save("best")


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether work of this interval (0: off) falls on the step; all of it falls on the last."""
    return step > 0 and (step >= last or (interval > 0 and step % interval == 0))
