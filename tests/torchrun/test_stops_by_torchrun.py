"""Under plain torchrun, a stop is one attempt, and the SIGTERM after a death is not a stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from launches import Launch, finish
from machine import listening
from runs import TAPE

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

FLAGS = (*TAPE, "--task=failing_task:Failing", "--task.norm=batch", "--data.workers=2",
         "--checkpoint.every=1000")


def torchrun(run: Path, *arguments: str, **env: str) -> Launch:
    return Launch(run, *FLAGS, *arguments, by="torchrun", options=["--max-restarts=3"],
                  **env).start()


@pytest.mark.long
def test_a_signal_to_one_rank_is_one_attempt_and_all_stop_at_the_same_step(tmp_path: Path) -> None:
    with torchrun(tmp_path / "run", "--steps=1000", SLOW_TRAIN_S="0.03") as launch:
        launch.wait(lambda: len(launch.events("first-step")) == 2)
        os.kill(launch.ranks()[1], signal.SIGUSR1)
        launch.end(1)

    stops = launch.events("stop")
    assert sorted(e["rank"] for e in stops) == [0, 1]
    assert {e["step"] for e in stops} == {inspect(launch.run)["step"]}
    assert [(a["start_step"], a["end"]) for a in inspect(launch.run)["attempts"]] == [
        (0, "stopped")]


@pytest.mark.parametrize("faults", [
    ("kill:rank=1:step=8", "slow:rank=0:step=8:seconds=3"),
    pytest.param(("kill:rank=1:phase=data:attempt=0", "slow:phase=data:attempt=0:seconds=5"),
                 marks=pytest.mark.long)])
def test_the_signal_after_a_death_is_no_stop(tmp_path: Path, faults: tuple[str, ...]) -> None:
    with torchrun(tmp_path / "run", "--steps=12", *(f"--inject={f}" for f in faults)) as launch:
        launch.wait(lambda: launch.events("fault"))
        open_to_all = [a for a in listening(launch.process.pid).values() if not a.strip("0")]
        launch.end()

    assert len(inspect(launch.run)["attempts"]) == 2
    assert launch.events("stop") == []
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert open_to_all
    assert "`torchrun --standalone` has two listeners on all interfaces" in readme


@pytest.mark.long
@pytest.mark.timeout(400)
def test_stops_while_torchrun_and_its_ranks_start_or_train(undisturbed, tmp_path: Path) -> None:
    run = tmp_path / "run"

    for number, after_s in enumerate((0.5, 2.0, 4.0, 6.0, 8.0, 10.0)):
        with torchrun(run, "--steps=60", SLOW_TRAIN_S="0.1") as launch:
            launch.wait(lambda: len(launch.ranks()) == 2)
            time.sleep(after_s)  # the exact time does not matter
            for pid in launch.tree()[:None if number % 2 else 1]:
                os.kill(pid, signal.SIGTERM)
            stopped_s = time.monotonic()
            assert launch.process.wait(200) != 0
            assert time.monotonic() - stopped_s < 30
    finish(run, *FLAGS, "--steps=60", by="torchrun")

    assert launch.events("failure") == []
    assert list(differences(undisturbed(2, *FLAGS, "--steps=60"), run)) == []
