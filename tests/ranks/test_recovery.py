"""Bad steps: skipped by all ranks, reported, excluded after a roll-back; ranks that differ."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, steps, train, weights

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.optim.bad_step_check import NONFINITE
from trainer.run import bad_steps
from trainer.run.bad_steps import describe_bad_step
from trainer.step import Step

TASK = ["--task=sick_task:Sick", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.norm=batch", "--task.samples=160",
        "--data.shuffle=off"]  # fmt: skip
# Without shuffling, step n of an epoch has the samples from 8 (n - 1) up to 8 n.


def run(ranks, size: int, folder: Path, *arguments: str) -> list[int]:
    return ranks(size, train, *TASK, *arguments, f"--run-dir={folder}", group=False)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind from rank 0."""
    found = [json.loads(t) for t in (folder / "events.jsonl").read_text().splitlines()]
    return [e for e in found if e["event"] == kind and e["rank"] == 0]


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoints/step-{step:08d}/state.json").read_text())


@pytest.mark.parametrize(("way", "norm"), [
    ("input", "batch"), ("gradient", "group"), ("outlier", "canonical"),
    *(pytest.param(*other, marks=pytest.mark.long)
      for other in [("input", "group"), ("loss", "group"), ("outlier", "batch")]),
])
def test_a_bad_sample_is_skipped_with_any_number_of_ranks(ranks, tmp_path, way, norm):
    # Sample 44 is in the third of the four micro-batches of step 6: with W = 2, rank 1's first.
    sick = ["--task.first=44", "--task.end=45", f"--task.way={way}", "--steps=8",
            f"--task.norm={norm}"]
    if norm == "canonical":
        sick[-1:] = ["--task.norm=batch", "--parallel.reduction=canonical"]
    folders = {size: tmp_path / str(size) for size in (1, 2, 4)}

    for size, folder in folders.items():
        assert run(ranks, size, folder, *sick) == [0] * size

    for size, folder in folders.items():
        assert [line["step"] for line in steps(folder) if line.get("skipped")] == [6]
        (event,) = events(folder, "skipped")
        (cause,) = event["causes"]
        assert (cause["rank"], cause["micro_batch"]) == (2 * size // 4, 2)
        assert cause["samples"] == [44, 45]
        assert cause["input"] == ([44] if way in ("input", "outlier") else [])
        assert event["parameters"] or way == "outlier"
        assert bool(cause["buffers"]) == (way == "outlier")
        assert all(torch.isfinite(t).all() for t in weights(folder, 8).values())
        if norm == "group":
            one = weights(folders[1], 8)
            assert all(torch.allclose(one[n], t, atol=1e-5)
                       for n, t in weights(folder, 8).items())


def test_a_run_without_any_update_is_not_complete(ranks, tmp_path, capfd):
    arguments = ["--task.first=0", "--task.end=160", "--steps=2", "--task.norm=group"]

    assert run(ranks, 2, tmp_path, *arguments) == [77, 77]

    assert "none of the 2 steps gave an update" in "".join(capfd.readouterr())
    assert not (tmp_path / "summary.json").exists()
    assert run(ranks, 2, tmp_path, *arguments, "--task.end=8", "--steps=4",
               "--accept=task.end") == [0, 0]


def test_a_count_of_zero_is_named_as_the_cause():
    text = describe_bad_step(NONFINITE, [], [], 2, count=0)

    assert "the sum of Outcome.count over all micro-batches, which divides the loss, is 0" in text


@pytest.mark.parametrize("reduction", ["ddp", "canonical"])
def test_a_non_finite_buffer_of_an_empty_micro_batch_makes_no_step_bad(
    ranks, tmp_path, reduction
):
    # 4 micro-batches on 3 ranks: the first two ranks compute an empty one as well. The last rank's
    # buffers count.
    assert run(ranks, 3, tmp_path, "--task.centred", "--steps=3", "--task.norm=group",
               f"--parallel.reduction={reduction}") == [0, 0, 0]

    assert [line.get("skipped") for line in steps(tmp_path)] == [None] * 3
    assert all(torch.isfinite(t).all() for t in weights(tmp_path, 3).values())


def test_a_buffer_that_an_empty_micro_batch_makes_non_finite_is_reported():
    cause = {"rank": 1, "micro_batch": -1, "samples": [], "loss": "0.0", "input": [],
             "buffers": ["mean"]}

    text = describe_bad_step(NONFINITE, [cause], [], 3)

    assert "makes mean non-finite on rank 1, an empty micro-batch, which must change no" in text
    assert "must not change its buffers for an empty batch" in text


def test_all_ranks_decide_equally_after_a_warm_up_with_an_empty_micro_batch(ranks, tmp_path):
    # The last window of an epoch has only one micro-batch, that of the last rank.
    sick = ["--task.first=0", "--task.end=1", "--task.way=outlier", "--task.samples=10",
            "--data.drop-last=off", "--parallel.reduction=canonical", "--epochs=2"]

    assert run(ranks, 2, tmp_path, *sick, "--inject=raise:step=2") == [1, 1]
    assert run(ranks, 2, tmp_path, *sick) == [0, 0]

    assert [line["step"] for line in steps(tmp_path) if line.get("skipped")] == [1, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_consecutive_bad_steps_are_rolled_back_and_excluded(ranks, tmp_path, size, capfd):
    # Steps 6, 7, 8 of each epoch of 20 are bad.
    arguments = ["--task.first=40", "--task.end=64", "--task.way=loss", "--epochs=2",
                 "--checkpoint.every=4", "--checkpoint.keep=1"]
    folder = tmp_path / "run"

    assert run(ranks, size, folder, *arguments) == [0] * size

    lines = steps(folder)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["step"] for line in lines if line.get("skipped")] == [6, 7, 8, 26, 27, 28]
    back = events(folder, "rollback")
    assert [(e["at_step"], e["to_step"], e["left_out"], e["generation"]) for e in back] == [
        (8, 4, [6, 7, 8], 1), (28, 24, [6, 7, 8, 26, 27, 28], 2)]
    assert "rolled back to step 4" in capfd.readouterr().out
    progress = state(folder, 40)["progress"]
    assert progress["bad"] == progress["left_out"] == [6, 7, 8, 26, 27, 28]
    assert progress["skipped"] == 6
    # Skipping the batches without a roll-back is the same computation.
    plain = tmp_path / "plain"
    assert run(ranks, size, plain, *arguments, "--nonfinite.max-in-row=0") == [0] * size
    assert all(torch.equal(weights(plain, 40)[n], t) for n, t in weights(folder, 40).items())


@pytest.mark.parametrize("deaths", [["kill:step=9:rank=1:phase=backward"],
                                    pytest.param(["term:step=5"], marks=pytest.mark.long),
                                    ["term:step=7:rank=1", "term:step=8"]])
def test_a_stop_or_death_around_a_roll_back_changes_no_bit(ranks, tmp_path, deaths):
    arguments = ["--task.first=40", "--task.end=64", "--task.way=loss", "--steps=24",
                 "--checkpoint.every=4", "--task.dropout=0.2", "--data.workers=1"]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    faults = [f"--inject={text}" for text in deaths]

    assert run(ranks, 2, straight, *arguments) == [0, 0]
    for death in deaths:
        outcomes = ranks.outcomes(2, train, *TASK, *arguments, *faults, f"--run-dir={killed}",
                                  group=False)
        if death.startswith("kill"):
            assert outcomes[1].signal == 9
        else:
            assert [outcome.value for outcome in outcomes] == [75, 75]
    assert run(ranks, 2, killed, *arguments, *faults) == [0, 0]

    assert not list(differences(straight, killed))
    assert metrics(straight) == metrics(killed)
    assert state(killed, 24)["generation"] >= 1


def test_abandoned_checkpoints_are_not_resumed_from(ranks, tmp_path):
    arguments = ["--task.first=40", "--task.end=64", "--task.way=loss", "--steps=24",
                 "--checkpoint.every=1", "--checkpoint.keep=9"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(ranks, 2, whole, *arguments) == [0, 0]
    assert run(ranks, 2, cut, *arguments, "--inject=term:step=9:phase=data") == [75, 75]

    # Step 9 follows the roll-back from step 8 to 5: later checkpoints are of the new generation.
    kept = inspect(cut)["checkpoints"]
    assert {c["generation"] for c in kept if c["step"] > 5} == {1}
    shutil.rmtree(cut / "checkpoints/step-00000009")
    assert run(ranks, 2, cut, *arguments) == [0, 0]
    assert not list(differences(whole, cut))


def test_too_many_bad_steps_end_the_run_with_77_and_finite_checkpoints(ranks, tmp_path, capfd):
    arguments = ["--inject=nan:rank=1:always", "--steps=40", "--checkpoint.every=1",
                 "--checkpoint.keep=1", "--nonfinite.max-total=7"]

    assert run(ranks, 2, tmp_path / "run", *arguments) == [77, 77]

    output = capfd.readouterr().out
    assert output.count("error: ") == 1
    assert "--nonfinite.max-total is 7" in output
    kept = inspect(tmp_path / "run")["checkpoints"]
    assert kept
    assert all(c["valid"] for c in kept)
    for c in kept:
        assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run", c["step"]).values())


def test_infinite_weights_are_never_saved(ranks, tmp_path):
    # Gradients are finite, but the rate is too high: the update itself makes weights infinite.
    arguments = ["--optim.lr=1e38", "--optim.name=sgd", "--schedule.warmup=off", "--clip.norm=0",
                 "--steps=12", "--checkpoint.every=1", "--checkpoint.keep=1",
                 "--nonfinite.max-total=5"]

    assert run(ranks, 2, tmp_path / "run", *arguments) == [77, 77]

    for c in inspect(tmp_path / "run")["checkpoints"]:
        assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run", c["step"]).values())


def test_a_loss_spike_is_excluded_if_enabled(ranks, tmp_path):
    arguments = ["--task.first=144", "--task.end=160", "--task.way=spike", "--steps=20"]

    assert run(ranks, 2, tmp_path / "on", *arguments, "--nonfinite.spike-z=30",
               "--nonfinite.max-in-row=2", "--checkpoint.every=5") == [0, 0]
    assert run(ranks, 2, tmp_path / "off", *arguments) == [0, 0]

    assert [e["why"] for e in events(tmp_path / "on", "skipped")] == ["spike", "spike"]
    assert [e["left_out"] for e in events(tmp_path / "on", "rollback")] == [[19, 20]]
    assert not events(tmp_path / "off", "skipped")


@pytest.mark.parametrize(("size", "rank"), [
    (2, 1), (3, 0), *(pytest.param(*other, marks=pytest.mark.long) for other in [(2, 0), (3, 1)])])
def test_a_flipped_bit_is_found_reported_and_undone(ranks, tmp_path, size, rank):
    arguments = ["--steps=30", "--checkpoint.every=5", "--parallel.verify-every=3"]
    straight, flipped = tmp_path / "straight", tmp_path / "flipped"
    flip = f"--inject=flip:rank={rank}:step=10:phase=step-end"

    assert run(ranks, size, straight, *arguments) == [0] * size
    assert run(ranks, size, flipped, *arguments, flip) == [0] * size

    (event,) = events(flipped, "divergence")
    assert event["at_step"] - 10 <= 3
    if size == 2:
        assert event["ranks"] == [0, 1]
        assert [e["culprit"] for e in events(flipped, "divergence-explained")] == [rank]
    else:
        assert event["ranks"] == [rank]
    assert not list(differences(straight, flipped))


def flip_a_buffer(*arguments: str) -> int:
    """In a rank: train, and flip a bit of rank 1's running mean once, after step 10."""
    make, flipped = Step.__call__, []

    def flip(step: Step, *args: Any, **options: Any) -> Any:
        result = make(step, *args, **options)
        if os.environ["RANK"] == "1" and result.step == 10 and not flipped:
            flipped.append(result.step)
            mean = next(b for n, b in step.compute.model.named_buffers()
                        if n.endswith("running_mean"))
            mean.view(torch.int32)[0] ^= 1
        return result

    Step.__call__ = flip
    return train(*arguments)


@pytest.mark.parametrize("norm", ["on", "off"])
def test_a_flipped_bit_of_a_buffer_is_found_and_undone(ranks, tmp_path, norm):
    arguments = [*TASK, f"--parallel.sync-bn={norm}", "--steps=20", "--checkpoint.every=5"]
    straight, flipped = tmp_path / "straight", tmp_path / "flipped"

    assert ranks(2, train, *arguments, f"--run-dir={straight}", group=False) == [0, 0]
    assert ranks(2, flip_a_buffer, *arguments, f"--run-dir={flipped}", group=False) == [0, 0]

    (event,) = events(flipped, "divergence")
    assert event["at_step"] == 10
    assert all(name.endswith("running_mean") for name in event["tensors"])
    assert not list(differences(straight, flipped))


@pytest.mark.parametrize(("size", "last", "fault"), [
    (2, 12, "kill:rank=1:step=7:phase=step-end"),
    pytest.param(3, 12, "kill:rank=0:step=7:phase=optimizer", marks=pytest.mark.long),
    pytest.param(3, 7, "kill:rank=1:step=7:phase=step-end", marks=pytest.mark.long),
])  # fmt: skip
def test_a_death_between_the_last_bad_step_and_the_roll_back_changes_nothing(
    ranks, tmp_path, size, last, fault
):
    arguments = [*(f"--inject=nan:step={step}:always" for step in (5, 6, 7)), f"--steps={last}",
                 "--checkpoint.every=3"]
    assert run(ranks, size, tmp_path / "straight", *arguments) == [0] * size

    killed = [*TASK, *arguments, f"--inject={fault}", f"--run-dir={tmp_path / 'killed'}"]
    ranks.outcomes(size, train, *killed, group=False)
    assert ranks(size, train, *killed, group=False) == [0] * size

    assert state(tmp_path / "straight", last)["progress"]["left_out"] == [5, 6, 7]
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))


def die_before_the_roll_back(*arguments: str) -> int:
    """In a rank: train; rank 0 dies when the roll-back searches a checkpoint."""
    find = bad_steps.find_checkpoint

    def die_or_find(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return find(*args, **options)

    bad_steps.find_checkpoint = die_or_find
    return train(*arguments)


def test_a_transient_fault_is_remembered_after_a_death_before_the_roll_back(
    ranks, tmp_path
):
    # Each NaN is injected once: a restart from before them would train on those batches.
    arguments = [*(f"--inject=nan:step={step}" for step in (5, 6, 7)), "--steps=12",
                 "--checkpoint.every=3"]
    assert run(ranks, 2, tmp_path / "straight", *arguments) == [0, 0]

    killed = [*TASK, *arguments, f"--run-dir={tmp_path / 'killed'}"]
    ranks.outcomes(2, die_before_the_roll_back, *killed, group=False)
    assert inspect(tmp_path / "killed")["step"] == 7
    assert ranks(2, train, *killed, group=False, timeout_s=60) == [0, 0]

    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))
