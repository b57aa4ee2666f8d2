"""How much of the time a run that is interrupted at random spends on new work: formula, simulation.

Times are in seconds, failures come at random (exponential gaps) with the mean `mtbf_s`, also while
a restart is under way. Goodput is new work / time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a run pays.

    Attributes:
        step_s: an optimizer step.
        interval_s: work from one periodic save to the next.
        save_s: for how long a save holds the training.
        durable_s: from a save's beginning until a restart can use it.
        restart_s: from a failure to the first step that is made again or new; without the work
            that is made again.
        survivors: whether those that are left save the last step boundary, so that a failure takes
            no more than the step in the making.
    """

    step_s: float
    interval_s: float
    save_s: float
    restart_s: float
    durable_s: float = 0.0
    survivors: bool = True


def young(save_s: float, mtbf_s: float) -> float:
    """The interval of saves that costs least, to first order (Young 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(costs: Costs, mtbf_s: float) -> float:
    """The goodput by the complete formula of Daly (2006), eq. 20: saves take effect at once.

    With survivors the piece of work that a failure takes is a step instead of an interval, and its
    share of a save comes with it.
    """
    piece = costs.step_s if costs.survivors else costs.interval_s
    save = costs.save_s * piece / costs.interval_s
    spent = mtbf_s * math.exp(costs.restart_s / mtbf_s) * math.expm1((piece + save) / mtbf_s)
    return piece / spent


def simulate(costs: Costs, mtbf_s: float, *, failures: int, seed: int = 0) -> float:
    """The goodput of a run that ends with its `failures`-th failure."""
    draw = random.Random(seed)
    work = spent = 0.0
    for _ in range(failures):
        alive = draw.expovariate(1 / mtbf_s)
        spent += alive
        if alive > costs.restart_s:  # else it dies amid the restart, which begins anew
            work += kept(costs, alive - costs.restart_s)
    return work / spent


def kept(costs: Costs, trained_s: float) -> float:
    """The work that outlives a failure after so many seconds of training since a restart."""
    cycle = costs.interval_s + costs.save_s
    saves, rest = divmod(trained_s, cycle)
    if costs.survivors:
        rest = min(rest, costs.interval_s)
        return saves * costs.interval_s + rest - math.fmod(rest, costs.step_s)
    # The save after the n-th interval begins at n cycles - save_s.
    delay = max(0.0, costs.durable_s - costs.save_s)
    return max(0.0, math.floor((trained_s - delay) / cycle)) * costs.interval_s


def mtbf_s(gpus: int, *, failures_per_1000_node_days: float, gpus_per_node: int = 8) -> float:
    """Mean time from failure to failure of a job on so many GPUs."""
    return 86400 * 1000 / failures_per_1000_node_days / (gpus / gpus_per_node)
