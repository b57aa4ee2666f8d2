"""Work between two steps: validation, and a requested stop."""

from __future__ import annotations

from typing import NoReturn

from trainer.errors import StopRequested
from trainer.run.bad_steps import replicas_match
from trainer.run.finish import update_best
from trainer.run.run import Run
from trainer.telemetry.metrics import validation_line
from trainer.telemetry.status import Phase


def validate(run: Run) -> None:
    """Collective. Validate, and save the weights if they are the best so far."""
    if run.validate is None:
        return
    run.status.enter(Phase.EVALUATE)
    with run.world.long_timeout():
        scores = run.validate()
    if scores is None:
        stop(run)  # a resumed run starts with this validation
    run.status.enter(Phase.TRAIN)  # from here on an error leaves an inconsistent state
    step = run.progress.step
    line = validation_line(step, scores, run.state.meter.take_mean())
    run.metrics.validation(line)
    run.progress.validated = step
    run.state.schedule.validated(line)
    if update_best(run.config.eval.best, run.state.best, line, step, run.config.eval.min_delta):
        run.checkpoint.save("best")
    run.draw()


def stop(run: Run) -> NoReturn:
    """Collective. Save this step boundary, and raise StopRequested."""
    replicas_match(run)
    run.status.enter(Phase.STOP)
    run.checkpoint.save("stop")
    run.checkpoint.settle()
    raise StopRequested(f"stopped on request after step {run.progress.step}; "
                        "run the same command to continue")


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether periodic work is due at a step. All work is due at the last step.

    Args:
        interval: in steps; 0 is off.
    """
    return step > 0 and (step >= last or (interval > 0 and step % interval == 0))
