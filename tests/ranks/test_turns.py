"""Several optimizers, turns, and the task's methods for the moments of a run."""

from __future__ import annotations

import math

import pytest
import torch
from runs import run, steps, until_done, validations, weights
from turns_task import Turns

from trainer import rng
from trainer.commands.compare import differences
from trainer.tasks.ring import Ring

TASK = ("--task=turns_task:Turns", "--device=cpu", "--data.workers=0", "--batch.global-size=12",
        "--batch.micro-size=2", "--steps=20", "--checkpoint.every=7", "--eval.every=4",
        "--start-checks=on")  # fmt: skip


def order_of(count: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.mix(0, rng.ORDER, epoch))
    return torch.randperm(count, generator=generator)


def gan_by_hand(task: Ring, count: int) -> dict[str, torch.Tensor]:
    """`count` steps of the usual loop in plain torch; the weights after them."""
    rng.seed_all(0, rng.MODEL)
    model, data = task.model(), task.dataset("train").tensors[0]
    optimizers = task.optimizers(model)
    batches = [rows for epoch in range(2) for rows in order_of(len(data), epoch).split(64)]
    for step, rows in enumerate(batches[:count], 1):
        turn = ("critic", "critic", "generator")[(step - 1) % 3]
        optimizers[turn].zero_grad()
        for number, micro in enumerate(rows.split(32)):
            rng.seed_all(step, number, state=rng.mix(0, rng.MICRO))
            real, made = data[micro], model.generator(torch.randn(32, task.latent))
            if turn == "critic":
                loss = (torch.nn.functional.softplus(-model.critic(real)).sum()
                        + torch.nn.functional.softplus(model.critic(made.detach())).sum())
            else:
                loss = torch.nn.functional.softplus(-model.critic(made)).sum()
            (loss / 64).backward()
        optimizers[turn].step()
    return model.state_dict()


def test_a_gan_in_turns_has_the_bits_of_a_loop_written_by_hand(ranks, tmp_path):
    folder = run(ranks, 1, tmp_path / "run", "ring", "--device=cpu", "--task.points=3520",
                 "--task.width=16", "--task.critic-lr=0.002", "--batch.global-size=64",
                 "--batch.micro-size=32", "--steps=100",
                 "--eval.every=off", "--optim.ema=0")

    task = Ring(points=3520, width=16, critic_lr=0.002, seed=0)
    found, expected = weights(folder, 100), gan_by_hand(task, 100)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    lines = steps(folder)
    assert [line["turn"] for line in lines[:4]] == ["critic", "critic", "generator", "critic"]
    assert lines[0]["lrs"] == {"critic": 0.002, "generator": 0.001}
    assert "made" in lines[0]
    assert "made" not in lines[2]
    assert [line["lr"] for line in lines[1:3]] == [0.002, 0.001]
    assert validations(folder)[-1].keys() >= {"val_modes", "val_table"}
    assert not list(differences(folder, folder)), "what it has written can be read"


@pytest.mark.parametrize(("muon", "frozen"), [(False, 0), (True, 0), (False, 11)])
def test_two_optimizers_have_the_bits_of_a_plain_loop(ranks, tmp_path, muon, frozen):
    """SGD and Adam, or Muon and AdamW: a schedule for the first, limits for each, the task's
    `after_step` and `epoch`, and a layer that is `frozen` at first."""
    folder = run(ranks, 1, tmp_path / "run", *TASK, "--task.together", "--task.plain",
                 "--batch.micro-size=12", "--schedule.warmup=off", "--schedule.min-ratio=0",
                 "--clip.norm=0.7", *["--task.muon"] * muon,
                 *["--freeze=0.*", f"--freeze-until={frozen}"] * bool(frozen))

    task = Turns(together=True, plain=True, muon=muon)
    rng.seed_all(0, rng.MODEL)
    model, (x, y) = task.model(), task.dataset("train").tensors
    first, (second, *_) = task.optimizers(model).values()
    limits = [(first, 0.7), (second, 0.1)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        first, lambda n: (1 + math.cos(math.pi * (n + 1) / 20)) / 2)
    batches = [(epoch, rows) for epoch in range(3) for rows in order_of(96, epoch).split(12)]
    for step, (epoch, rows) in enumerate(batches[:20], 1):
        task.epoch(epoch)
        model[0].requires_grad_(step > frozen)
        model.zero_grad()
        (task.scale * (model(x[rows]) - y[rows]).square().sum() / 12).backward()
        for optimizer, limit in limits:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            task.after_step(model, step)
    found = weights(folder, 20)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("more", [
    ["--optim.ema=0.9", "--nonfinite.spike-z=50", "--inject=nan:step=5:always"],
    ["--task.together", "--schedule.name=one-cycle"],
    ["--precision.dtype=fp16", "--precision.loss-scale=1e9"],
    pytest.param(["--parallel.find-unused=on"], marks=pytest.mark.long),
], ids=["turns", "together", "fp16", "find-unused"])
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(ranks, undisturbed, tmp_path, more):
    kills = ("--inject=kill:rank=1:step=9:phase=backward",
             "--inject=kill:rank=0:step=12:phase=step-end")

    codes = until_done(ranks, 2, tmp_path / "run", *TASK, *more, *kills)

    assert [1, -9] in codes
    whole = [flag for flag in more if "inject" not in flag]
    expected = undisturbed(2, *TASK, *more)
    assert not list(differences(expected, tmp_path / "run"))
    assert any(line.get("skipped") for line in steps(expected)) == (
        whole != more or "--precision.dtype=fp16" in more)


@pytest.mark.parametrize("more", [
    [], ["--task.together", "--task.muon", "--optim.ema=0.9"],
    ["--freeze=body.0.*", "--freeze-until=11", "--precision.dtype=fp16",
     "--precision.loss-scale=1e9"],
], ids=["turns", "muon", "frozen"])
def test_in_canonical_the_number_of_ranks_may_change(ranks, undisturbed, tmp_path, more):
    arguments = [*TASK, "--parallel.reduction=canonical", *more]

    until_done(ranks, [3, 2], tmp_path / "run", *arguments,
               "--inject=kill:rank=1:step=9:phase=forward")

    assert not list(differences(undisturbed(1, *arguments), tmp_path / "run"))


@pytest.mark.parametrize("more", [["--optim.name=sgd"], ["--parallel.reduction=canonical"]])
def test_unfreezing_has_the_bits_of_a_frozen_run_and_then_of_a_continued_one(
    ranks, undisturbed, tmp_path, more
):
    """Until then as with --freeze; a killed run has the bits of an undisturbed one."""
    arguments = [*TASK, "--task=small_task:Small", "--eval.every=off", "--freeze=body.*", *more]
    late = [*arguments, "--freeze-until=10"]
    sizes = [3, 2] if "canonical" in more[0] else 2

    until_done(ranks, sizes, tmp_path / "run", *late,
               "--inject=kill:rank=1:step=9:phase=backward", "--inject=kill:rank=0:step=14")
    frozen = run(ranks, 1, tmp_path / "frozen", *arguments)

    whole = undisturbed(2, *late)
    assert not list(differences(whole, tmp_path / "run"))
    losses = [[line["loss"] for line in steps(folder)] for folder in (frozen, whole)]
    assert losses[0][:10] == pytest.approx(losses[1][:10], abs=1e-6)
    assert losses[0][12:] != pytest.approx(losses[1][12:], abs=1e-4)
    for name in ("body.0.weight", "body.1.running_mean"):
        first, then = (weights(folder, 7)[name] for folder in (frozen, whole))
        assert torch.equal(first, then)
        assert not torch.equal(then, weights(whole, 20)[name])
