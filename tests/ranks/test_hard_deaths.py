"""Deaths at awkward moments: best weights in flight, the last save, a stop that can't be saved."""

from __future__ import annotations

import json

import pytest
from runs import metrics, steps, train

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.samples=160", "--task.validation=6",
        "--checkpoint.every=1000"]  # fmt: skip


def finish(ranks, size: int, run, *arguments: str) -> None:
    assert ranks(size, train, *TASK, *arguments, f"--run-dir={run}", group=False) == [0] * size


def die(ranks, size: int, run, *arguments: str) -> list[int | None]:
    """The exit codes of the ranks, None for a death by signal."""
    outcomes = ranks.outcomes(size, train, *TASK, *arguments, f"--run-dir={run}", group=False)
    return [None if o.signal else (o.exit_code or o.value) for o in outcomes]


def test_best_weights_in_flight_survive_the_writers_death(ranks, tmp_path):
    arguments = ["--steps=12", "--eval.every=5", "--eval.best=val_loss:max", "--optim.lr=0.02"]
    faults = ["--inject=slow:step=5:phase=save-begin:seconds=30", "--inject=kill:step=8"]
    finish(ranks, 2, tmp_path / "straight", *arguments)

    codes = die(ranks, 2, tmp_path / "killed", *arguments, *faults)
    assert codes == [None, 1]
    found = {c["step"]: c for c in inspect(tmp_path / "killed")["checkpoints"]}
    finish(ranks, 2, tmp_path / "killed", *arguments, *faults)

    assert set(found) == {5, 7}
    assert all(c["valid"] for c in found.values())
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))


def test_a_failed_save_of_the_best_weights_is_made_up_for(ranks, tmp_path):
    arguments = ["--steps=12", "--eval.every=5", "--eval.best=val_loss:max", "--optim.lr=0.02",
                 "--checkpoint.every=7"]
    finish(ranks, 1, tmp_path / "straight", *arguments)

    finish(ranks, 1, tmp_path / "full", *arguments, "--inject=enospc:step=5:phase=save-begin")

    assert not list(differences(tmp_path / "straight", tmp_path / "full"))


@pytest.mark.parametrize("phase", ["save-begin", "save-mid", "save-end"])
def test_a_death_in_the_last_save_loses_no_step(ranks, tmp_path, phase):
    finish(ranks, 2, tmp_path / "straight", "--steps=9")

    codes = die(ranks, 2, tmp_path / "killed", "--steps=9", f"--inject=kill:step=9:phase={phase}")
    newest = inspect(tmp_path / "killed")["step"]
    finish(ranks, 2, tmp_path / "killed", "--steps=9", f"--inject=kill:step=9:phase={phase}")

    assert codes == [None, 1]
    assert newest == 9
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))


def test_a_stop_that_can_not_be_saved_is_a_failure_on_all_ranks(ranks, tmp_path):
    codes = die(ranks, 2, tmp_path / "run", "--steps=9", "--inject=term:step=4",
                "--inject=enospc:step=4:phase=save-begin:always")

    assert codes == [1, 1]


def test_the_save_of_a_stop_or_of_the_end_is_tried_once_more(ranks, tmp_path):
    # Weights of step 5 that wait, the stop's own, and best ones of the last step.
    arguments = ["--steps=9", "--eval.every=5", "--eval.best=val_loss:max", "--optim.lr=0.02",
                 "--checkpoint.every=7"]
    finish(ranks, 2, tmp_path / "straight", *arguments)
    full = [f"--inject=enospc:step={step}:phase=save-begin" for step in (5, 6, 9)]
    stop = "--inject=term:step=6"

    assert die(ranks, 2, tmp_path / "run", *arguments, *full, stop) == [75, 75]
    finish(ranks, 2, tmp_path / "run", *arguments, *full, stop)

    assert not list(differences(tmp_path / "straight", tmp_path / "run"))


def test_a_survivors_save_is_tried_once_more(ranks, tmp_path):
    codes = die(ranks, 2, tmp_path / "run", "--steps=9", "--inject=kill:step=6:rank=1",
                "--inject=enospc:phase=save-mid")

    assert codes == [1, None]
    assert inspect(tmp_path / "run")["step"] == 5


def test_a_validation_that_is_done_again_stands_once(ranks, tmp_path):
    arguments = ["--steps=12", "--eval.every=5", "--log.every=1"]
    stops = ["--inject=term:step=5", "--inject=kill:step=8"]
    finish(ranks, 1, tmp_path / "straight", *arguments)

    # Stopped before the due validation; then killed after it, with nothing saved since.
    assert die(ranks, 1, tmp_path / "run", *arguments, *stops) == [75]
    assert die(ranks, 1, tmp_path / "run", *arguments, *stops) == [None]
    finish(ranks, 1, tmp_path / "run", *arguments, *stops)

    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    assert not list(differences(tmp_path / "straight", tmp_path / "run"))


def test_a_run_whose_identity_is_lost_is_continued_and_nothing_is_overwritten(ranks, tmp_path):
    finish(ranks, 1, tmp_path / "straight", "--steps=9")
    assert die(ranks, 1, tmp_path / "run", "--steps=9", "--inject=term:step=4") == [75]
    (tmp_path / "run/run.json").write_text('{"run": "ab')

    finish(ranks, 1, tmp_path / "run", "--steps=9", "--inject=term:step=4")

    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(1, 10))
    assert not list(differences(tmp_path / "straight", tmp_path / "run"))


def test_a_run_whose_validations_are_all_nan_comes_to_its_end(ranks, tmp_path):
    finish(ranks, 1, tmp_path / "run", "--steps=4", "--eval.every=2", "--optim.name=sgd",
           "--optim.lr=1e30", "--clip.norm=0", "--schedule.warmup=off")

    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best"]["value"] is None
    assert "best" not in summary["model.safetensors"]


def test_a_peer_that_hangs_is_survived_like_one_that_dies(ranks, tmp_path):
    arguments = ["--steps=9", "--world.timeout-s=5", "--inject=hang:step=6:rank=0"]
    finish(ranks, 2, tmp_path / "straight", "--steps=9")

    outcomes = ranks.outcomes(2, train, *TASK, *arguments, f"--run-dir={tmp_path / 'run'}",
                              group=False)

    assert outcomes[0].exit_code == 1  # left by its watchdog, once the other one was gone
    assert outcomes[1].exit_code == 1 or outcomes[1].value == 1
    assert inspect(tmp_path / "run")["step"] == 5
