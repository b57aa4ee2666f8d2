"""After a rank's death the survivors save the last step boundary: at most one step is repeated."""

from __future__ import annotations

import pytest
from launches import finish
from runs import TAPE

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

PHASES = ("stop", "rendezvous", "fork", "start", "join", "build", "warm-up", "restore", "train")
"""Phases of a restart, from the exit of a rank to the first step."""
FLAGS = (*TAPE, "--task.norm=batch", "--checkpoint.every=1000", "--steps=40")


@pytest.mark.parametrize(("size", "sync_bn"), [
    (3, "off"),
    *(pytest.param(*other, marks=pytest.mark.long) for other in [(2, "off"), (4, "auto")]),
])
def test_the_next_attempt_starts_from_the_last_boundary(undisturbed, tmp_path, size, sync_bn):
    arguments = [*FLAGS, f"--parallel.sync-bn={sync_bn}", "--task.dropout=0.2"]
    deaths = [(5, 0, "backward"), (12, size - 1, "forward"), (19, 1, "optimizer"),
              (20, 0, "step-end"), (31, size - 1, "backward")]
    faults = [f"--inject=kill:step={s}:rank={r}:phase={p}" for s, r, p in deaths]

    killed = finish(tmp_path / "killed", *arguments, *faults, size=size)

    assert not list(differences(undisturbed(size, *arguments), killed.run))
    starts = [attempt["start_step"] for attempt in inspect(killed.run)["attempts"]]
    assert len(starts) == len(deaths) + 1
    for start, (step, _, _) in zip(starts[1:], deaths, strict=True):
        assert start in (step - 1, step)
    waits = []
    for step, rank, _ in deaths:
        [fault] = killed.events("fault", at_step=step)
        reports = killed.events("lost-peer", attempt=fault["attempt"])
        assert len(reports) == size - 1, f"rank {rank} at step {step}"
        waits += [e["time"] - fault["time"] for e in reports]
    # Normally 0.1 s. Collectives time out after a minute, the grace time after half of one.
    assert max(waits) < 20
    begun = [e["entered"] for e in killed.events("first-step", rank=0)]
    assert {tuple(phases) for phases in begun[1:]} == {PHASES}
    assert all(list(phases.values()) == sorted(phases.values()) for phases in begun)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_save_that_exceeds_the_launchers_grace_time_is_not_begun(undisturbed, tmp_path):
    arguments = [*FLAGS, "--checkpoint.every=20", "--watchdog.limit-s=100"]
    # The save of step 20 takes 40 s, and step 25 waits for it; a death in step 30 loses 10 steps.
    faults = ["--inject=slow:phase=save-mid:step=20:seconds=40", "--inject=slow:step=25:seconds=45",
              "--inject=kill:rank=1:step=30"]

    killed = finish(tmp_path / "killed", *arguments, *faults)

    why = "step 29 is not saved: by the speed of the last save this would take 40 s"
    assert why in killed.output()
    assert [a["start_step"] for a in inspect(killed.run)["attempts"]] == [0, 20]
    assert not list(differences(undisturbed(2, *arguments), killed.run))
