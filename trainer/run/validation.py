"""Work between two steps: validation, and a requested stop."""

from __future__ import annotations

from typing import NoReturn

from trainer.errors import ConfigError, StopRequested
from trainer.run.bad_steps import replicas_match
from trainer.run.finish import update_best
from trainer.run.run import Run
from trainer.telemetry.metrics import validation_line
from trainer.telemetry.status import Phase


def validate(run: Run) -> None:
    """Collective. Validate, and save the weights if they are the best so far."""
    config, status, state = run.context.config, run.context.status, run.state
    if not run.validations:
        return
    status.enter(Phase.EVALUATE)
    with run.context.world.long_timeout():
        scores = {}
        for split, evaluator in run.validations.items():
            if (found := evaluator()) is None:
                save_and_stop(run)  # a resumed run starts with this validation
            scores[split] = found
    states = [evaluator.states for evaluator in run.validations.values()]
    if never := {*states[0].metrics}.difference(*(one.computed for one in states)):
        raise ConfigError(f"--task: metrics() has {min(never)!r}, but the loss returns arguments "
                          "for it in no validation set; add them to Outcome.predictions.")
    status.enter(Phase.TRAIN)  # from here on an error leaves an inconsistent state
    step = state.progress.step
    line = validation_line(step, scores, state.meter.take_mean())
    run.folder.metrics.validation(line)
    state.progress.complete_validation()
    run.guard.validation_clock.restart()
    state.schedule.validated(line)
    if update_best(config.eval.best, state.best, line, step, config.eval.min_delta):
        run.guard.checkpoint.save("best")
    run.recorders.draw(step)
    run.context.world.barrier()  # rank 0 draws, for longer than a rank may wait in a step


def save_and_stop(run: Run) -> NoReturn:
    """Collective. Save this step boundary, and raise StopRequested."""
    replicas_match(run)
    run.context.status.enter(Phase.STOP)
    run.guard.checkpoint.save("stop")
    run.guard.checkpoint.settle()
    raise StopRequested(f"stopped on request after step {run.state.progress.step}; "
                        "run the same command to continue")
