"""Bad steps: skipped by all ranks, reported, excluded after a roll-back; ranks that differ."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest
import torch
from runs import TAPE, codes, events, run, state, steps, train, until_done, weights

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.run import bad_steps
from trainer.step import Step

TASK = (*TAPE, "--task=sick_task:Sick", "--task.norm=batch", "--data.shuffle=off")
"""Step n of an epoch has the samples from 8 (n - 1) up to 8 n."""
ROW = (*TASK, "--task.first=40", "--task.end=64", "--task.way=loss", "--steps=24",
       "--checkpoint.every=4")  # fmt: skip
"""Steps 6, 7, 8 of each epoch of 20 are bad."""


@pytest.mark.parametrize(("way", "norm"), [
    ("input", "batch"), ("gradient", "group"), ("outlier", "canonical"),
    pytest.param("loss", "group", marks=pytest.mark.long),
    pytest.param("outlier", "batch", marks=pytest.mark.long)])
def test_a_bad_sample_is_skipped_with_any_number_of_ranks(ranks, tmp_path, way, norm):
    # Sample 44 is in the third of the four micro-batches of step 6: with W = 2, rank 1's first.
    sick = [*TASK, "--task.first=44", "--task.end=45", f"--task.way={way}", "--steps=8",
            "--checkpoint.every=1", "--checkpoint.keep=9"]
    sick.append("--parallel.reduction=canonical" if norm == "canonical" else f"--task.norm={norm}")

    folders = {size: run(ranks, size, tmp_path / str(size), *sick) for size in (1, 2, 4)}

    for size, folder in folders.items():
        assert [line["step"] for line in steps(folder) if line.get("skipped")] == [6]
        (event,) = events(folder, "skipped", rank=0)
        (cause,) = event["causes"]
        assert (cause["rank"], cause["micro_batch"]) == (2 * size // 4, 2)
        assert cause["samples"] == [44, 45]
        assert cause["input"] == ([44] if way in ("input", "outlier") else [])
        assert event["parameters"] or way == "outlier"
        assert bool(cause["buffers"]) == (way == "outlier")
        before, after, last = (weights(folder, step) for step in (5, 6, 8))
        assert all(torch.equal(before[n], t) for n, t in after.items())
        assert all(torch.isfinite(t).all() for t in last.values())
        if norm == "group":
            one = weights(folders[1], 8)
            assert all(torch.allclose(one[n], t, atol=1e-5) for n, t in last.items())


def test_a_run_without_any_update_is_not_complete(ranks, tmp_path, capfd):
    arguments = [*TASK, "--task.first=0", "--task.end=160", "--steps=2", "--task.norm=group"]

    run(ranks, 2, tmp_path, *arguments, code=77)

    assert "none of the 2 steps gave an update" in capfd.readouterr().out
    assert not (tmp_path / "summary.json").exists()
    run(ranks, 2, tmp_path, *arguments, "--task.end=8", "--steps=4", "--accept=task.end")


def test_all_ranks_decide_equally_after_a_warm_up_with_a_stand_in(ranks, tmp_path):
    # The last window of an epoch has only one micro-batch, that of the last rank.
    sick = [*TASK, "--task.first=0", "--task.end=1", "--task.way=outlier", "--task.samples=10",
            "--data.drop-last=off", "--parallel.reduction=canonical", "--epochs=2"]

    assert until_done(ranks, 2, tmp_path, *sick, "--inject=raise:step=2") == [[1, 1], [0, 0]]

    assert [line["step"] for line in steps(tmp_path) if line.get("skipped")] == [1, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_consecutive_bad_steps_are_rolled_back_and_excluded(
    ranks, undisturbed, tmp_path, capfd, size
):
    arguments = [*ROW, "--steps=None", "--epochs=2", "--checkpoint.keep=1"]

    folder = run(ranks, size, tmp_path / "run", *arguments)

    lines = steps(folder)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["step"] for line in lines if line.get("skipped")] == [6, 7, 8, 26, 27, 28]
    back = events(folder, "rollback", rank=0)
    assert [(e["at_step"], e["to_step"], e["left_out"], e["generation"]) for e in back] == [
        (8, 4, [6, 7, 8], 1), (28, 24, [6, 7, 8, 26, 27, 28], 2)]
    assert "rolled back to step 4" in capfd.readouterr().out
    progress = state(folder, 40)["progress"]
    assert progress["bad"] == progress["left_out"] == [6, 7, 8, 26, 27, 28]
    assert progress["skipped"] == 6
    # Skipping the batches without a roll-back is the same computation.
    plain = undisturbed(size, *arguments, "--nonfinite.max-in-row=0")
    assert all(torch.equal(weights(plain, 40)[n], t) for n, t in weights(folder, 40).items())


@pytest.mark.parametrize(("faults", "ends"), [
    (["kill:step=9:rank=1:phase=backward"], [[1, -9]]),
    (["term:step=7:rank=1", "term:step=8"], [[75, 75], [75, 75]])])
def test_a_stop_or_death_around_a_roll_back_changes_no_bit(
    ranks, undisturbed, tmp_path, faults, ends
):
    arguments = [*ROW, "--task.dropout=0.2", "--data.workers=1"]

    ended = until_done(ranks, 2, tmp_path / "run", *arguments,
                       *(f"--inject={text}" for text in faults))

    assert ended == [*ends, [0, 0]]
    assert not list(differences(undisturbed(2, *arguments), tmp_path / "run"))
    assert state(tmp_path / "run", 24)["generation"] >= 1


def test_abandoned_checkpoints_are_not_resumed_from(ranks, undisturbed, tmp_path):
    arguments = [*ROW, "--checkpoint.every=1", "--checkpoint.keep=9"]
    cut = run(ranks, 2, tmp_path / "cut", *arguments, "--inject=term:step=9:phase=data", code=75)

    # Step 9 follows the roll-back from step 8 to 5: later checkpoints are of the new generation.
    kept = inspect(cut)["checkpoints"]
    assert {c["generation"] for c in kept if c["step"] > 5} == {1}
    shutil.rmtree(cut / "checkpoints/step-00000009")
    run(ranks, 2, cut, *arguments)
    assert not list(differences(undisturbed(2, *arguments), cut))


@pytest.mark.parametrize("cause", [
    ["--inject=nan:rank=1:always"],
    # Gradients are finite, but the rate is too high: the update itself makes weights infinite.
    ["--optim.lr=1e38", "--optim.name=sgd", "--schedule.warmup=off", "--clip.norm=0"]])
def test_too_many_bad_steps_end_the_run_with_77_and_finite_checkpoints(
    ranks, tmp_path, capfd, cause
):
    folder = run(ranks, 2, tmp_path / "run", *TASK, *cause, "--steps=40", "--checkpoint.every=1",
                 "--checkpoint.keep=1", "--nonfinite.max-total=5", code=77)

    output = capfd.readouterr().out
    assert output.count("error: ") == 1
    assert "--nonfinite.max-total is 5" in output
    kept = inspect(folder)["checkpoints"]
    assert kept
    for checkpoint in kept:
        assert checkpoint["valid"]
        tensors = weights(folder, checkpoint["step"]).values()
        assert all(torch.isfinite(tensor).all() for tensor in tensors)


def test_a_loss_spike_is_excluded_if_enabled(ranks, tmp_path):
    arguments = [*TASK, "--task.first=144", "--task.end=160", "--task.way=spike", "--steps=20"]

    on = run(ranks, 2, tmp_path / "on", *arguments, "--nonfinite.spike-z=30",
             "--nonfinite.max-in-row=2", "--checkpoint.every=5")
    off = run(ranks, 2, tmp_path / "off", *arguments)

    assert [e["why"] for e in events(on, "skipped", rank=0)] == ["spike", "spike"]
    assert [e["left_out"] for e in events(on, "rollback", rank=0)] == [[19, 20]]
    assert not events(off, "skipped")


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (3, 0)])
def test_a_flipped_bit_is_found_reported_and_undone(ranks, undisturbed, tmp_path, size, rank):
    arguments = [*TASK, "--steps=30", "--checkpoint.every=5", "--parallel.verify-every=3"]

    flipped = run(ranks, size, tmp_path / "run", *arguments,
                  f"--inject=flip:rank={rank}:step=10:phase=step-end")

    (event,) = events(flipped, "divergence", rank=0)
    assert event["at_step"] - 10 <= 3
    if size == 2:
        assert event["ranks"] == [0, 1]
        assert [e["culprit"] for e in events(flipped, "divergence-explained", rank=0)] == [rank]
    else:
        assert event["ranks"] == [rank]
    assert not list(differences(undisturbed(size, *arguments), flipped))


def flip_a_buffer(*arguments: str) -> int:
    """In a rank: train, and flip a bit of rank 1's running mean once, after step 10."""
    make, due = Step.__call__, [10] if os.environ["RANK"] == "1" else []

    def flip(step: Step, *args: Any, **options: Any) -> Any:
        result = make(step, *args, **options)
        if result.step in due:
            due.clear()
            mean = next(b for n, b in step.compute.model.named_buffers()
                        if n.endswith("running_mean"))
            mean.view(torch.int32)[0] ^= 1
        return result

    Step.__call__ = flip
    return train(*arguments)


@pytest.mark.parametrize("norm", ["on", "off"])
def test_a_flipped_bit_of_a_buffer_is_found_and_undone(ranks, undisturbed, tmp_path, norm):
    arguments = [*TASK, f"--parallel.sync-bn={norm}", "--steps=20", "--checkpoint.every=5"]

    flipped = run(ranks, 2, tmp_path / "run", *arguments, function=flip_a_buffer)

    (event,) = events(flipped, "divergence", rank=0)
    assert event["at_step"] == 10
    assert all(name.endswith("running_mean") for name in event["tensors"])
    assert not list(differences(undisturbed(2, *arguments), flipped))


@pytest.mark.parametrize(("size", "last", "fault"), [
    (2, 12, "kill:rank=1:step=7:phase=step-end"),
    pytest.param(3, 7, "kill:rank=0:step=7:phase=optimizer", marks=pytest.mark.long)])
def test_a_death_between_the_last_bad_step_and_the_roll_back_changes_nothing(
    ranks, undisturbed, tmp_path, size, last, fault
):
    arguments = [*TASK, *(f"--inject=nan:step={step}:always" for step in (5, 6, 7)),
                 f"--steps={last}", "--checkpoint.every=3"]
    straight = undisturbed(size, *arguments)

    assert len(until_done(ranks, size, tmp_path / "run", *arguments, f"--inject={fault}")) == 2

    assert state(straight, last)["progress"]["left_out"] == [5, 6, 7]
    assert not list(differences(straight, tmp_path / "run"))


def die_before_the_roll_back(*arguments: str) -> int:
    """In a rank: train; rank 0 dies when the roll-back searches a checkpoint."""
    if os.environ["RANK"] == "0":
        bad_steps.find_checkpoint = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return train(*arguments)


def test_a_transient_fault_is_remembered_after_a_death_before_the_roll_back(
    ranks, undisturbed, tmp_path
):
    # Each NaN is injected once: a restart from before them would train on those batches.
    arguments = [*TASK, *(f"--inject=nan:step={step}" for step in (5, 6, 7)), "--steps=12",
                 "--checkpoint.every=3"]
    killed = tmp_path / "run"

    codes(ranks, 2, *arguments, f"--run-dir={killed}", function=die_before_the_roll_back)
    assert inspect(killed)["step"] == 7
    run(ranks, 2, killed, *arguments)

    assert not list(differences(undisturbed(2, *arguments), killed))
