"""Schedules, averaged weights, recomputed blocks and NaN detection in exact runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import metrics, steps, train, validations, weights
from safetensors.torch import load_file

from trainer.commands.compare import differences

TASK = ["--task=tape_task:Tape", "--device=cpu", "--data.workers=0", "--batch.global-size=8",
        "--batch.micro-size=2", "--task.samples=160", "--task.norm=batch",
        "--task.validation=6"]  # fmt: skip


def until_done(ranks, size: int, folder: Path, *arguments: str) -> None:
    """Repeat the command until the run is complete, over stops and deaths."""
    for _ in range(9):
        outcomes = ranks.outcomes(size, train, *TASK, *arguments, f"--run-dir={folder}",
                                  group=False)
        if all(outcome.value == 0 for outcome in outcomes):
            return
    raise AssertionError("the run is not complete")


@pytest.mark.parametrize("optimizer", [
    ["--optim.name=sgd", "--optim.nesterov=on"], ["--optim.name=torch.optim:RMSprop"],
], ids=["nesterov", "rmsprop"])  # fmt: skip
def test_other_optimizers_resume_from_a_stop_with_the_same_bits(ranks, tmp_path, optimizer):
    arguments = ["--steps=6", "--optim.lr=0.01", *optimizer]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"

    until_done(ranks, 1, straight, *arguments)
    until_done(ranks, 1, stopped, *arguments, "--inject=term:step=2", "--inject=term:step=5")

    assert not list(differences(straight, stopped))
    assert load_file(stopped / "checkpoints/step-00000006/optimizer.safetensors")


PLATEAU = ["--schedule.name=plateau", "--schedule.options=patience=0",
           "--schedule.options=factor=0.5", "--schedule.options=threshold=0.2",
           "--schedule.warmup=4", "--eval.every=2", "--optim.lr=0.02"]  # fmt: skip


@pytest.mark.parametrize("craft", [
    ["--optim.ema=0.9", "--optim.rates=body.*=0.5", *PLATEAU],
    pytest.param(["--schedule.name=one-cycle", "--schedule.warmup=3", "--optim.ema=0.5",
                  "--eval.every=5"], marks=pytest.mark.long),
], ids=["ema-plateau", "one-cycle"])  # fmt: skip
def test_stops_and_deaths_change_no_bit(ranks, tmp_path, craft):
    arguments = ["--steps=20", "--checkpoint.every=4", *craft]
    straight, hurt = tmp_path / "straight", tmp_path / "hurt"
    faults = ["--inject=term:step=2", "--inject=kill:rank=1:step=6:phase=backward",
              "--inject=kill:rank=0:step=10:phase=evaluate", "--inject=term:step=15:rank=1"]

    until_done(ranks, 2, straight, *arguments)
    until_done(ranks, 2, hurt, *arguments, *faults)

    assert not list(differences(straight, hurt))
    assert metrics(straight) == metrics(hurt)
    assert len(steps(hurt)) == 20
    checkpoint = hurt / "checkpoints/step-00000020"
    assert "ema.safetensors" in json.loads((checkpoint / "manifest.json").read_text())["files"]


def test_a_plateau_follows_the_validation_loss(ranks, tmp_path):
    until_done(ranks, 1, tmp_path / "run", "--steps=20", *PLATEAU)

    rates = [line["lr"] for line in steps(tmp_path / "run")]
    losses = {line["step"]: line["val_loss"] for line in validations(tmp_path / "run")}
    expected, rate, best = [], 0.02, float("inf")
    for step in range(1, 21):
        expected.append(rate * min(1.0, step / 4))
        if step in losses and step >= 3:
            if losses[step] < best * 0.8:
                best = losses[step]
            else:
                rate *= 0.5
    assert rates == pytest.approx(expected, abs=1e-12)
    assert rates[-1] < 0.02


def test_averaged_weights_are_validated_and_exported(ranks, tmp_path):
    arguments = ["--steps=12", "--eval.every=4", "--optim.lr=0.05", "--checkpoint.keep=5"]
    until_done(ranks, 1, tmp_path / "plain", *arguments)
    until_done(ranks, 1, tmp_path / "ema", *arguments, "--optim.ema=0.9")

    plain, ema = ([line["val_loss"] for line in validations(tmp_path / run)]
                  for run in ("plain", "ema"))
    assert [line["loss"] for line in steps(tmp_path / "plain")] == [
        line["loss"] for line in steps(tmp_path / "ema")]
    assert plain != ema
    summary = json.loads((tmp_path / "ema/summary.json").read_text())
    best = summary["best"]["step"]
    assert summary["model.safetensors"].startswith(f"the averaged weights of step {best}")
    average = load_file(tmp_path / f"ema/checkpoints/step-{best:08d}/ema.safetensors")
    product = load_file(tmp_path / "ema/model.safetensors")
    trained = weights(tmp_path / "ema", best)
    assert all(torch.equal(product[n], average.get(n, trained[n])) for n in product)
    assert any(not torch.equal(average[n], trained[n]) for n in average)


def test_recomputed_activations_change_no_bit(ranks, tmp_path):
    for every in (0, 2):  # batch norms synchronise in the second forward too
        ended = ranks(2, train, "--task=resnet_task:ResNet", "--device=cpu", "--data.workers=0",
                      "--batch.global-size=4", "--batch.micro-size=2", "--steps=2",
                      f"--precision.recompute-every={every}", f"--run-dir={tmp_path / str(every)}",
                      group=False)
        assert ended == [0, 0]

    assert not list(differences(tmp_path / "0", tmp_path / "2"))


def test_the_operation_that_creates_a_nan_is_reported_by_its_rank(ranks, tmp_path):
    ended = ranks(2, train, "--task=sick_task:Sick", *TASK[1:], "--task.way=gradient",
                  "--task.first=44", "--task.end=45", "--data.shuffle=off", "--task.norm=group",
                  "--steps=8", "--numerics.anomaly=on", f"--run-dir={tmp_path / 'run'}",
                  group=False)

    assert ended == [0, 0]
    events = [json.loads(t) for t in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (event,) = [e for e in events if e["event"] == "anomaly"]
    found = {k: event[k] for k in ("at_step", "micro_batch", "rank", "phase", "node", "module")}
    assert found == {"at_step": 6, "micro_batch": 2, "rank": 1, "phase": "backward",
                     "node": "AbsBackward0", "module": None}  # infinity · 0


@pytest.mark.parametrize(("flags", "message"), [
    (["--task.validation=0"], "the task has no validation data"),
    (["--schedule.options=metric=val_f1:max"], "it computes val_loss, val_abs"),
], ids=["no-validation", "no-such-figure"])  # fmt: skip
def test_a_plateau_without_its_metric_is_refused(ranks, tmp_path, capfd, flags, message):
    ended = ranks(1, train, *TASK, "--steps=4", "--schedule.name=plateau", *flags,
                  f"--run-dir={tmp_path / 'run'}", group=False)

    assert ended == [2]
    output = capfd.readouterr()
    assert message in output.out + output.err
