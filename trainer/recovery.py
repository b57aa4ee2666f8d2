"""What a run does in mid-attempt when a step is bad or ranks differ: name it, and go back."""

from __future__ import annotations

from collections.abc import Sequence

from trainer import blame
from trainer.errors import NonFinite, RanksDiffer
from trainer.health import BAD, NONFINITE
from trainer.parts import Parts
from trainer.source import find
from trainer.status import Phase
from trainer.step import StepResult

MOST_ROUNDS = 4
"""Ranks that differ again and again in the same steps are more than a passing fault."""


def face_skipped(run: Parts, result: StepResult) -> None:
    """Collective. After a step without an update: say why, and go back if there were too many in
    a row.

    Raises:
        NonFinite: there have been more than --nonfinite.max-total.
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
    run.log.announce(f"step {result.step} gives no update: {why}. In a row: "
                     f"{len(progress.bad_row)} of --nonfinite.max-in-row {nonfinite.max_in_row}; "
                     f"in all: {len(progress.bad)} of --nonfinite.max-total {nonfinite.max_total}")
    face_row(run, why)


def face_row(run: Parts, why: str = "told by an attempt before this one") -> None:
    """Collective. Go back if there are too many steps without an update in a row; also at a start,
    where a rank has died after the last of them, before the run could.

    Raises:
        NonFinite: the last one was one more than --nonfinite.max-total.
    """
    progress, most = run.progress, run.config.nonfinite.max_total
    row, total = progress.bad_row, len(progress.bad)
    if row and total > most:
        raise NonFinite(
            f"step {progress.step}: {total} steps had a loss or gradient that can't be used, and "
            f"--nonfinite.max-total is {most}; the last one: {why}. The newest "
            "checkpoint is from before; mend the cause, or allow more, and run the command again.")
    if run.row_is_full:
        _leave_out(run, row)


def ranks_agree(run: Parts) -> bool:
    """Collective. Compare the ranks' weights and optimizer; False if they differed and the run is
    back at the last checkpoint at which they didn't.

    Raises:
        RanksDiffer: there is no such checkpoint.
    """
    agreement, step = run.agreement, run.progress.step
    if run.world.size == 1 or agreement.step == step or not run.intervals.verify:
        return True
    found = agreement.check(step)
    if found is None:
        if agreement.is_wanted(step):
            rank = agreement.culprit()
            run.log.event("divergence-explained", at_step=step, culprit=rank)
            run.log.announce(f"step {step} was computed again from where ranks agreed: "
                             + ("it can't be told which rank was wrong" if rank is None else
                                f"rank {rank} was wrong; look after its memory and device"))
        return True
    ranks = ", ".join(map(str, found.ranks))
    names = ", ".join(found.tensors[:3]) + (", …" if len(found.tensors) > 3 else "")
    run.log.event("divergence", at_step=step, ranks=found.ranks, tensors=found.tensors,
                  agreed_step=agreement.step)
    who = (f"rank {ranks} differs from the others" if len(found.ranks) == 1
           else f"ranks {ranks} differ")
    run.log.announce(f"step {step}: silent divergence: {who} in {names}; they last agreed at step "
                     f"{agreement.step}")
    if agreement.rounds >= MOST_ROUNDS:
        raise RanksDiffer(
            f"step {step}: {who}, for the {agreement.rounds}th time in a row, "
            "however often the steps were computed anew: look for what differs between ranks "
            "(memory, a device, a model or an optimizer that draws random numbers of its own)")
    if not _go_back(run, newest=agreement.step):
        raise RanksDiffer(
            f"step {step}: {who} and there is no checkpoint of step "
            f"{agreement.step} or before to go back to; the next start computes the run anew")
    return False


def _leave_out(run: Parts, row: Sequence[int]) -> None:
    """Collective. Go back to the newest checkpoint, from now on without these batches."""
    progress, at = run.progress, run.progress.step
    # From before the row, if there is one: what is saved since has the same weights, and if these
    # are to blame, so are those.
    went_back = any(_go_back(run, left_out=row, newest=step) for step in (row[0] - 1, at))
    if not went_back:  # their updates were left out, so the weights are those from before
        progress.left_out = sorted({*progress.left_out, *row})
    batches = ", ".join(map(str, row))
    run.log.announce(
        f"step {at}: batches {batches} are left out from now on; "
        + (f"back at step {progress.step}" if went_back else
           "there is no checkpoint to go back to, so the run goes on with the weights from before"))


def _go_back(run: Parts, *, left_out: Sequence[int] = (), newest: int | None = None) -> bool:
    """Collective. Restore the newest checkpoint, up to step `newest`, in a new generation, which
    is saved at once: a death from here on doesn't lead back to what is abandoned.

    Returns:
        False if there is none.
    """
    progress, at = run.progress, run.progress.step
    if not left_out:  # ranks differ: nothing that a survivor holds is worth keeping
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
        # Also what was bad after the checkpoint: it counts once, however often it is met.
        progress.bad, progress.left_out = bad, left_out
        run.checkpoint.save("periodic")
        run.checkpoint.finish_pending()
    run.agreement.step = found.step
    run.status.move_to(found.step)
    run.log.event("rollback", at_step=at, to_step=found.step, left_out=left_out,
                  generation=run.checkpoint.generation)
    return True
