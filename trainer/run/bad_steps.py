"""Recovery within an attempt: report bad steps and rank mismatches, and roll back."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.checkpoint.source import find
from trainer.errors import NonFinite, RanksDiffer
from trainer.optim.bad_step_check import BAD, NONFINITE
from trainer.run import blame
from trainer.run.run import Parts
from trainer.step import StepResult
from trainer.telemetry.status import Phase

MOST_ROUNDS = 4
"""Number of consecutive mismatches in the same steps that are no longer a transient fault."""


def face_skipped(run: Parts, result: StepResult) -> None:
    """Collective. Report a step without an update, and roll back after too many consecutive ones.

    Raises:
        NonFinite: more than --nonfinite.max-total bad steps.
    """
    if result.fault not in BAD:
        return
    nonfinite, progress = run.config.nonfinite, run.progress
    parameters = blame.bad_parameters(run.step)
    causes = (blame.find_causes(run.step, run.loader.read, run.world)
              if result.fault == NONFINITE else [])
    run.state.key_rng(run.world.rank)
    why = blame.told(result.fault, causes, parameters, len(run.step.parameters),
                     count=result.sums.count)
    run.log.event("skipped", at_step=result.step, why=result.fault, causes=causes,
                  parameters=parameters, loss=str(result.sums.loss))
    run.log.announce(f"skipped step {result.step}: {why} (consecutive bad steps: "
                     f"{len(progress.bad_row)} of --nonfinite.max-in-row {nonfinite.max_in_row}; "
                     f"in total: {len(progress.bad)} of --nonfinite.max-total "
                     f"{nonfinite.max_total})")
    face_row(run, why)


def face_row(run: Parts, why: str = "reported by an earlier attempt") -> None:
    """Collective. Roll back after too many consecutive bad steps.

    Also called at a start: a rank may have died after the last of them, before the roll-back.

    Raises:
        NonFinite: more than --nonfinite.max-total bad steps.
    """
    progress, most = run.progress, run.config.nonfinite.max_total
    row, total = progress.bad_row, len(progress.bad)
    if row and total > most:
        raise NonFinite(
            f"step {progress.step}: {total} steps had an unusable loss or gradient, and "
            f"--nonfinite.max-total is {most}; the last one: {why}. The newest checkpoint is from "
            "before; correct the cause, or raise the limit, and run the command again.")
    if run.row_is_full:
        _exclude(run, row)


def ranks_agree(run: Parts) -> bool:
    """Collective. Compare weights and optimizer state of all ranks, and roll back if they differ.

    Returns:
        False after a roll-back to the last checkpoint at which they were equal.

    Raises:
        RanksDiffer: no such checkpoint is left, or ranks differed too often.
    """
    agreement, step = run.agreement, run.progress.step
    if run.world.size == 1 or agreement.step == step or not run.intervals.verify:
        return True
    found = agreement.check(step)
    if found is None:
        if agreement.is_wanted(step):
            rank = agreement.culprit()
            run.log.event("divergence-explained", at_step=step, culprit=rank)
            run.log.announce(f"step {step} was recomputed from a state equal on all ranks: "
                             + ("which rank was wrong is unknown" if rank is None else
                                f"rank {rank} was wrong; check its memory and device"))
        return True
    ranks = ", ".join(map(str, found.ranks))
    names = ", ".join(found.tensors[:3]) + (", …" if len(found.tensors) > 3 else "")
    run.log.event("divergence", at_step=step, ranks=found.ranks, tensors=found.tensors,
                  agreed_step=agreement.step)
    who = (f"rank {ranks} differs from the others" if len(found.ranks) == 1
           else f"ranks {ranks} differ")
    run.log.announce(f"step {step}: silent divergence: {who} in {names}; they were last equal at "
                     f"step {agreement.step}")
    if agreement.rounds >= MOST_ROUNDS:
        raise RanksDiffer(
            f"step {step}: {who}, for the {agreement.rounds}th consecutive time, although the "
            "steps were recomputed each time: look for what differs between ranks (memory, a "
            "device, a model or an optimizer with an unseeded random generator)")
    if not _roll_back(run, newest=agreement.step):
        raise RanksDiffer(
            f"step {step}: {who} and there is no checkpoint of step {agreement.step} or before to "
            "roll back to; the next start computes the run from the beginning")
    return False


def _exclude(run: Parts, row: Sequence[int]) -> None:
    """Collective. Roll back, and exclude the batches of these steps from now on."""
    progress, at = run.progress, run.progress.step
    # Prefer a checkpoint from before these steps: later ones hold the same weights, which may be
    # the cause.
    rolled_back = any(_roll_back(run, left_out=row, newest=step) for step in (row[0] - 1, at))
    if not rolled_back:  # their updates were skipped, so the weights are those from before
        progress.left_out = sorted({*progress.left_out, *row})
    batches = ", ".join(map(str, row))
    run.log.announce(
        f"step {at}: batches {batches} are excluded from now on; "
        + (f"rolled back to step {progress.step}" if rolled_back else
           "there is no checkpoint to roll back to, so the run continues with the weights from "
           "before them"))


def _roll_back(run: Parts, *, left_out: Sequence[int] = (), newest: int | None = None) -> bool:
    """Collective. Restore the newest checkpoint in a new generation, and save it at once.

    The save makes sure that no later restart continues from the abandoned steps.

    Args:
        left_out: steps whose batches are excluded from now on.
        newest: the last step that counts.

    Returns:
        False if there is no checkpoint.
    """
    progress, at = run.progress, run.progress.step
    if not left_out:  # ranks differ: the state of a survivor must not be saved
        run.status.enter(Phase.ROLL_BACK)
    run.checkpoint.finish_pending()
    run.checkpoint.forget()
    with run.world.patient():
        found = find(run.checkpoint.store, run.world, run.identity.run, newest=newest)
        if found is None:
            return False
        run.status.enter(Phase.ROLL_BACK)
        bad, left_out = list(progress.bad), sorted({*progress.left_out, *left_out})
        run.reopen(found)
        run.checkpoint.go_back(found)
        # Includes bad steps after the checkpoint: each counts once, however often it is repeated.
        progress.bad, progress.left_out = bad, left_out
        run.checkpoint.save("periodic")
        run.checkpoint.finish_pending()
    run.agreement.step = found.step
    run.status.move_to(found.step)
    run.log.event("rollback", at_step=at, to_step=found.step, left_out=left_out,
                  generation=run.checkpoint.generation)
    return True
