"""The goodput (new work / time) of a run that is interrupted at random: formula and simulation.

Failures come with exponential gaps of mean `mtbf_s`, also during a restart. Times are in seconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a run."""

    step_s: float
    interval_s: float
    """Work from one periodic save to the next."""
    save_s: float
    """For which a save holds the training."""
    restart_s: float
    """From a failure to the first step, without work that is redone."""
    durable_s: float = 0.0
    """From the start of a save until a restart can use it."""
    survivors: bool = True
    """Whether surviving ranks save the last step boundary: a failure costs only a step."""


def young(save_s: float, mtbf_s: float) -> float:
    """The interval of saves that costs least, to first order (Young 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(costs: Costs, mtbf_s: float) -> float:
    """The goodput by Daly's complete formula (2006, eq. 20), where saves are durable at once. With
    survivors a failure costs a step, with its share of a save, instead of an interval."""
    piece = costs.step_s if costs.survivors else costs.interval_s
    save = costs.save_s * piece / costs.interval_s
    spent = mtbf_s * math.exp(costs.restart_s / mtbf_s) * math.expm1((piece + save) / mtbf_s)
    return piece / spent


def simulate(costs: Costs, mtbf_s: float, *, failures: int) -> float:
    """The goodput of a run that ends with its `failures`-th failure."""
    draw = random.Random(0)
    work = spent = 0.0
    for _ in range(failures):
        alive = draw.expovariate(1 / mtbf_s)
        spent += alive
        if alive > costs.restart_s:  # otherwise it dies during the restart, which begins again
            work += kept(costs, alive - costs.restart_s)
    return work / spent


def kept(costs: Costs, trained_s: float) -> float:
    """The work that survives a failure this long after a restart."""
    cycle = costs.interval_s + costs.save_s
    saves, rest = divmod(trained_s, cycle)
    if costs.survivors:
        rest = min(rest, costs.interval_s)
        return saves * costs.interval_s + rest - math.fmod(rest, costs.step_s)
    # The save after the n-th interval begins at n cycles - save_s.
    delay = max(0.0, costs.durable_s - costs.save_s)
    return max(0.0, math.floor((trained_s - delay) / cycle)) * costs.interval_s


def mtbf_s(gpus: int, *, failures_per_1000_node_days: float) -> float:
    """Mean time between failures of a job, with 8 GPUs in a node."""
    return 86400 * 1000 / failures_per_1000_node_days / (gpus / 8)
