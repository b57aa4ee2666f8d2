"""Carry the position of a resumed run over to other batches or other data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.checkpoint.restore import CheckpointRef
from trainer.config.compatibility import settings
from trainer.config.schema import Config
from trainer.data.sampler import BatchPlan, DataPosition
from trainer.errors import ConfigError
from trainer.run.prepare import Setup, make_intervals

ORDER = ("seed", "data.shuffle", "data.order", "data.sampler")
"""Settings on which the order of the samples depends; with a sampler also the micro-batches."""
WINDOWS = ("batch.global_size", "data.drop_last")
"""Settings that divide an epoch into global batches."""


def carry_over(
    config: Config[Any], setup: Setup, found: CheckpointRef
) -> tuple[Setup, str]:
    """The setup at the position of a checkpoint: in the epoch, and after the samples of it, that
    the run has reached. Also returns a line on where the run continues, "" if it does so as if it
    had not been interrupted."""
    now, facts = settings(config), found.state.circumstances
    then = {**now, **found.state.settings}
    other_data = facts.get("data") not in (None, setup.fingerprints["train"])
    if setup.plan.in_lanes:
        return setup, _in_stream(now, then, other_data=other_data)
    before = _plan_of(setup.plan, then, facts)
    same = before == replace(setup.plan, origin=before.origin)
    origin = before.origin if same else before.place_after(found.state.progress.step)
    plan = replace(setup.plan, origin=origin)
    setup = replace(setup, plan=plan, intervals=make_intervals(config, plan))
    order = (*ORDER, *("batch.micro_size",) * (config.data.sampler is not None))
    other_order = other_data or any(now[name] != then[name] for name in order)
    if not other_order and all(now[name] == then[name] for name in WINDOWS):
        return setup, ""
    place = plan.place_after(found.state.progress.step)
    where, seen = "at its start", "no sample is seen twice"
    if place.sample:
        where = f"after {place.sample} of its {plan.samples} samples"
        if other_order:
            seen = ("their order is another one, so some samples of this epoch are seen twice and "
                    "some not at all")
    return setup, (f"continues in epoch {place.epoch + 1} {where}: {seen}; the run now has "
                   f"{setup.intervals.total} steps")


def _plan_of(plan: BatchPlan, then: Mapping[str, Any], facts: Mapping[str, Any]) -> BatchPlan:
    """The plan of the attempt that saved a checkpoint."""
    return replace(plan, samples=facts.get("samples", plan.samples),
                   global_size=then["batch.global_size"],
                   drop_last=then["data.drop_last"] == "on",
                   origin=DataPosition(*facts.get("origin", ())))


def _in_stream(now: Mapping[str, Any], then: Mapping[str, Any], *, other_data: bool) -> str:
    """Refuse other batches of a stream, whose lanes they would change."""
    for name in ("batch.global_size", "batch.micro_size"):
        if now[name] != then[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} was {then[name]} and is {now[name]}: the position in a stream is that of "
                f"its lanes, which the batches determine. Keep {flag} {then[name]}, or use another "
                "--run-dir for a new run.")
    return "continues at the saved position of the stream" * other_data
