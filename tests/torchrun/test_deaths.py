"""Under plain torchrun, a run that is killed seven times ends with the undisturbed bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos_plan import Fault, Run, Setting
from benchmarks.chaos_run import Launcher, train
from trainer.commands.compare import differences
from trainer.resilience.fault_injection import PHASES

LIMIT_S = 600.0

DEATHS = {
    2: (("start", 0), ("backward", 4), ("restore", None), ("save-mid", 9), ("evaluate", 16),
        ("data", 20), ("optimizer", 26)),
    3: (("forward", 1), ("save-begin", 6), ("step-end", 10), ("restore", None), ("backward", 14),
        ("save-end", 21), ("evaluate", 26)),
}
"""By number of ranks: phase and step of each death (attempt instead of step for `start`). After
a death during a save, the next one comes later than the next save, which waits for the first: so
each is a separate death."""


def test_the_deaths_cover_every_phase() -> None:
    assert {phase for deaths in DEATHS.values() for phase, _ in deaths} == set(PHASES)


@pytest.mark.timeout(1300)
@pytest.mark.long
@pytest.mark.parametrize("ranks", DEATHS)
def test_seven_deaths_in_one_run_change_no_bit(tmp_path: Path, ranks: int) -> None:
    setting = Setting(ranks=ranks, micro_batches=ranks + 1, sync_bn="auto", workers=0, seed=7)
    faults = tuple(_death(phase, at, ranks) for phase, at in DEATHS[ranks])
    torchrun = Launcher("torchrun", max_restarts=len(faults))
    whole = Run(number=0, setting=setting, faults=())
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"

    undisturbed = train(whole, straight, torchrun, limit_s=LIMIT_S)
    result = train(Run(number=1, setting=setting, faults=faults), disturbed, torchrun,
                   limit_s=LIMIT_S)

    output = disturbed.with_suffix(".log").read_text()
    assert undisturbed.problem is None, straight.with_suffix(".log").read_text()
    assert result.problem is None, output
    assert result.fired == faults, output
    assert (result.starts, result.launches) == (8, 1)
    assert list(differences(straight, disturbed)) == []


def _death(phase: str, at: int | None, ranks: int) -> Fault:
    """A SIGKILL of the last rank; for a save, of rank 0, which writes it."""
    rank = 0 if phase.startswith("save-") else ranks - 1
    if phase == "start":
        return Fault(kind="kill", rank=rank, phase=phase, attempt=at)
    return Fault(kind="kill", rank=rank, phase=phase, step=at)
