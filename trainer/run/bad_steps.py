"""Recovery within an attempt: report bad steps and rank mismatches, and roll back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.restore import find_checkpoint
from trainer.data import batch as batches
from trainer.data.map_dataset import MicroBatch
from trainer.distributed.world import World
from trainer.errors import NonFinite, RanksDiffer, listed
from trainer.optim.bad_step_check import BAD_REASONS, NONFINITE
from trainer.run.recorders import reopen
from trainer.run.run import Run
from trainer.step import Step, StepResult
from trainer.telemetry.status import Phase

SHOWN = 8  # causes in a message
SQUARED = math.sqrt(torch.finfo(torch.float32).max)  # the largest value with a finite square
MAX_MISMATCHES = 4  # consecutive ones, in the same steps, are no longer a transient fault


def report_skipped_step(run: Run, result: StepResult) -> None:
    """Collective. Report a step without an update, and roll back after too many in a row."""
    if result.skip_reason not in BAD_REASONS:
        return
    world, log, progress, step = run.context.world, run.context.log, run.state.progress, run.step
    nonfinite = run.context.config.nonfinite
    parameters = [name for name, parameter in step.compute.model.named_parameters()
                  if parameter.grad is not None and not _is_finite(parameter.grad)]
    causes, why = [], "the loss is far above the recent ones (--nonfinite.spike-z)"
    if result.skip_reason == NONFINITE:
        causes = find_causes(step, run.loader.read, world)
        why = describe_causes(causes, parameters, len(step.parameters), count=result.sums.count)
    run.state.key_rng(world.rank)
    log.event("skipped", at_step=result.step, why=result.skip_reason, causes=causes,
              parameters=parameters, loss=str(result.sums.loss))
    log.warn_once(f"skipped step {result.step}: {why} (consecutive bad steps: "
                  f"{len(progress.consecutive_bad_steps)} of --nonfinite.max-in-row "
                  f"{nonfinite.max_in_row}; in total: {len(progress.bad)} of "
                  f"--nonfinite.max-total {nonfinite.max_total})")
    handle_bad_streak(run, why)


def find_causes(step: Step, window: Sequence[MicroBatch], world: World) -> list[dict[str, Any]]:
    """Collective. Find the micro-batches that made the last step bad; `window` are this rank's.

    These are the ones whose loss was not finite. If all losses were finite, each micro-batch is
    computed again, and those whose gradients or buffers are not finite count. Returns for each:
    "rank", "micro_batch", "samples" (indices), "loss" (as text, since NaN is no JSON number),
    "buffers" (names of those that the forward left non-finite), and "input" (samples with
    non-finite values, or, with "buffers", with values that have no finite square)."""
    losses = [float(total) for total in step.objective.accumulator.totals]
    bad: dict[int, list[str]] = {
        i: [] for i, loss in enumerate(losses) if not math.isfinite(loss)}
    if not any(world.gather_json(bool(bad))):
        bad = _recompute(step, window)
    mine = [{"rank": world.rank, "micro_batch": window[i].spec.number,
             "samples": list(window[i].spec.indices), "loss": str(losses[i]),
             "input": _beyond(window[i], SQUARED if buffers else math.inf), "buffers": buffers}
            for i, buffers in bad.items()]
    causes = [cause for causes in world.gather_json(mine) for cause in causes]
    # Synchronised batch norm spreads a bad input to all ranks: then only its origin counts.
    return [cause for cause in causes if cause["input"]] or causes


def _recompute(step: Step, window: Sequence[MicroBatch]) -> dict[int, list[str]]:
    """Collective. Compute micro-batches again: index → non-finite buffers of each bad one, which
    has such buffers or gradients."""
    parameters, buffers, bad = step.parameters, step.boundary.buffers, {}
    buffers.keep()
    try:
        for i, micro in enumerate(window):
            step.optimizer.zero_grad(set_to_none=True)  # avoid memory for a second set of gradients
            batch = batches.to_device(micro.batch, parameters[0].device)
            spec = dataclasses.replace(micro.spec, last=False)
            step.forward_backward(MicroBatch(spec, batch), rehearsal=True)
            names = buffers.nonfinite_names()
            finite = all(_is_finite(p.grad) for p in parameters if p.grad is not None)
            if micro.samples and (names or not finite):
                bad[i] = names
            buffers.put_back()
    finally:  # if a peer dies in the meantime, this step boundary may be saved
        buffers.put_back()
        step.objective.forget()
    return bad


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient.to_dense()).all())


def _beyond(micro: MicroBatch, limit: float) -> list[int]:
    """Indices of the samples with a value that is not below the limit."""
    indices, found = micro.spec.indices, set()
    for tensor in batches.tensors(micro.batch):
        per_sample = tensor.dim() > 0 and len(tensor) == len(indices) > 0
        if tensor.is_floating_point() and per_sample:
            within = (tensor.reshape(len(tensor), -1).abs() < limit).all(1)
            found |= {indices[i] for i in (~within).nonzero().flatten().tolist()}
    return sorted(found)


def describe_causes(
    causes: Sequence[dict[str, Any]], parameters: Sequence[str], trainable: int, *, count: float
) -> str:
    """Describe why a step is not finite, and a remedy; `count` divides the loss of the step."""
    parts = [_describe(cause) for cause in causes[:SHOWN]]
    if not causes:
        parts.append(
            "the same computation is finite now, so data and weights are not the cause"
            if 0 < count < math.inf else
            f"the sum of Outcome.count over all micro-batches, which divides the loss, is {count:g}"
            "; return the number of summed values in the task's loss")
    if parameters:
        parts.append(f"gradients not finite: {len(parameters)} of {trainable} parameters "
                     f"({listed(parameters)})")
    if any(cause["input"] for cause in causes):
        parts.append("correct these samples, or exclude them in the data set")
    elif any(cause["buffers"] for cause in causes):
        parts.append("look for values that are far too large")
    elif causes:
        parts.append("try a lower --optim.lr or --clip.norm, --precision.dtype fp32, and a loss "
                     "that is defined everywhere (log of 0, sqrt at 0, division by 0); "
                     "--numerics.anomaly on names the module and the operation")
    return "; ".join(parts)


def _describe(cause: dict[str, Any]) -> str:
    samples, buffers, bad_input = cause["samples"], cause["buffers"], cause["input"]
    what = (f"loss {cause['loss']}" if not math.isfinite(float(cause["loss"])) else
            f"its forward makes {listed(buffers)} non-finite" if buffers else
            "the gradient is not finite")
    place = f"micro-batch {cause['micro_batch']} (samples {listed(samples)})"
    known = "values without a finite square" if buffers else "the input was already non-finite"
    return (f"{what} on rank {cause['rank']}, {place}"
            + f"; {known}: samples {listed(bad_input)}" * bool(bad_input))


def handle_bad_streak(run: Run, why: str = "reported by an earlier attempt") -> None:
    """Collective. Roll back after too many consecutive bad steps, and exclude their batches; raise
    NonFinite after more than --nonfinite.max-total. Also called at a start: a rank may have died
    before the roll-back."""
    progress, at, most = (run.state.progress, run.state.progress.step,
                          run.context.config.nonfinite.max_total)
    row, total = progress.consecutive_bad_steps, len(progress.bad)
    if row and total > most:
        raise NonFinite(
            f"step {at}: {total} steps had an unusable loss or gradient, and "
            f"--nonfinite.max-total is {most}; the last one: {why}. The newest checkpoint is from "
            "before; correct the cause, or raise the limit, and run the command again.")
    if not run.guard.must_roll_back:
        return
    # Prefer a checkpoint from before these steps: later ones hold the same weights, which may be
    # the cause.
    if any(_roll_back(run, exclude=row, newest=step) for step in (row[0] - 1, at)):
        what = f"rolled back to step {progress.step}"
    else:  # their updates were skipped, so the weights are those from before
        progress.exclude(row)
        what = "there is no checkpoint to roll back to, so the run continues as it is"
    run.context.log.warn_once(f"step {at}: batches {', '.join(map(str, row))} are excluded from "
                              f"now on; {what}")


def replicas_match(run: Run) -> bool:
    """Collective. Compare weights and optimizer state of all ranks; if they differ, roll back to
    the last checkpoint at which they were equal, and return False; RanksDiffer if there is none."""
    check, step, log = run.replica_check, run.state.progress.step, run.context.log
    if run.context.world.size == 1 or check.step == step or not run.setup.intervals.verify:
        return True
    found = check.check(step)
    if found is None:
        if check.has_recomputed(step):
            rank = check.faulty_rank()
            log.event("divergence-explained", at_step=step, culprit=rank)
            log.warn_once(f"step {step} was recomputed from a state equal on all ranks: "
                          + ("which rank was wrong is unknown" if rank is None else
                             f"rank {rank} was wrong; check its memory and device"))
        return True
    log.event("divergence", at_step=step, ranks=found.ranks, tensors=found.tensors,
              agreed_step=check.step)
    who = (f"rank {found.ranks[0]} differs from the others" if len(found.ranks) == 1
           else f"ranks {', '.join(map(str, found.ranks))} differ")
    log.warn_once(f"step {step}: silent divergence: {who} in {listed(found.tensors)}; they were "
                  f"last equal at step {check.step}")
    if check.consecutive_mismatches >= MAX_MISMATCHES:
        raise RanksDiffer(
            f"step {step}: {who}, for the {check.consecutive_mismatches}th consecutive time: look "
            "for what differs between ranks (memory, a device, an unseeded random generator)")
    if not _roll_back(run, newest=check.step):
        raise RanksDiffer(f"step {step}: {who}, and there is no checkpoint of step {check.step} or "
                          "before; the next start computes the run from the beginning")
    return False


def _roll_back(run: Run, *, newest: int, exclude: Sequence[int] = ()) -> bool:
    """Collective. Restore the newest checkpoint up to step `newest` in a new generation, and save
    it at once, so that no restart continues from the abandoned steps. Returns False without one."""
    world, status, checkpoint = run.context.world, run.context.status, run.guard.checkpoint
    progress, at = run.state.progress, run.state.progress.step
    if not exclude:  # ranks differ: the state of a survivor must not be saved
        status.enter(Phase.ROLL_BACK)
    checkpoint.finish_pending()
    checkpoint.confirm()
    with world.long_timeout():
        found = find_checkpoint(checkpoint.store, world, run.folder.identity.run_id, newest=newest,
                                mirror=run.folder.source)
        if found is None:
            return False
        status.enter(Phase.ROLL_BACK)
        state = found.state.for_validation(run.setup.fingerprints)
        found = dataclasses.replace(found, state=state)
        bad, excluded = list(progress.bad), [*progress.excluded_steps, *exclude]
        reopen(run, found)
        checkpoint.go_back(found)
        # Includes bad steps after the checkpoint: each counts once, however often it is repeated.
        progress.exclude(excluded, bad=bad)
        checkpoint.save("periodic")
        checkpoint.finish_pending()
    run.replica_check.restart_at(found.step)
    status.move_to(found.step)
    run.context.log.event("rollback", at_step=at, to_step=found.step,
                          left_out=progress.excluded_steps, generation=checkpoint.generation)
    return True
