"""Schedules, averaged weights, recomputed blocks, fine-tuning and NaN detection in exact runs."""

from __future__ import annotations

import pytest
import torch
from runs import PLATEAU, TAPE, events, run, steps, summary, validations, weights
from safetensors.torch import load_file

from trainer.commands.compare import differences

TASK = (*TAPE, "--task.norm=batch", "--task.validation=6")
RESNET = ("--task=resnet_task:ResNet", "--device=cpu", "--data.workers=0", "--batch.global-size=4",
          "--batch.micro-size=2", "--steps=2")  # fmt: skip


def test_a_plateau_follows_the_validation_loss(ranks, tmp_path):
    folder = run(ranks, 1, tmp_path / "run", *TASK, *PLATEAU, "--steps=20")

    rates = [line["lr"] for line in steps(folder)]
    losses = {line["step"]: line["val_loss"] for line in validations(folder)}
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
    arguments = [*TASK, "--steps=12", "--eval.every=4", "--optim.lr=0.05", "--checkpoint.keep=5"]
    plain = run(ranks, 1, tmp_path / "plain", *arguments)
    ema = run(ranks, 1, tmp_path / "ema", *arguments, "--optim.ema=0.9")

    assert [line["loss"] for line in steps(plain)] == [line["loss"] for line in steps(ema)]
    assert [line["val_loss"] for line in validations(plain)] != [
        line["val_loss"] for line in validations(ema)]
    best = summary(ema)["best"]["step"]
    assert summary(ema)["model.safetensors"].startswith(f"the averaged weights of step {best}")
    average = load_file(ema / f"checkpoints/step-{best:08d}/ema.safetensors")
    product, trained = load_file(ema / "model.safetensors"), weights(ema, best)
    assert all(torch.equal(product[n], average.get(n, trained[n])) for n in product)
    assert any(not torch.equal(average[n], trained[n]) for n in average)


def test_recomputed_activations_change_no_bit(ranks, tmp_path):
    # Batch norms synchronise in the second forward too.
    plain, again = (run(ranks, 2, tmp_path / f"{every}", *RESNET,
                        f"--precision.recompute-every={every}") for every in (0, 2))

    assert not list(differences(plain, again))


def test_the_operation_that_creates_a_nan_is_reported_by_its_rank(ranks, tmp_path):
    folder = run(ranks, 2, tmp_path / "run", *TASK, "--task=sick_task:Sick", "--task.way=gradient",
                 "--task.first=44", "--task.end=45", "--data.shuffle=off", "--task.norm=group",
                 "--steps=8", "--numerics.anomaly=on")

    (event,) = events(folder, "anomaly")
    assert event.items() >= {"at_step": 6, "micro_batch": 2, "rank": 1, "phase": "backward",
                             "node": "AbsBackward0", "module": None}.items()  # infinity · 0


def save_random_weights(path: str) -> None:
    """In a rank, which has torchvision: save weights of 1000 classes as old scripts did."""
    from torchvision.models import resnet18

    torch.manual_seed(5)
    state = resnet18().state_dict()
    torch.save({"state_dict": {f"module.{n}": t for n, t in state.items()}}, path)


def test_in_fine_tuning_a_new_head_learns_and_frozen_parts_stay_bit_identical(
    ranks, tmp_path, capfd
):
    path, folder = tmp_path / "resnet18.pth", tmp_path / "run"
    ranks(1, save_random_weights, str(path), group=False)
    tuning = [*RESNET, "--precision.channels-last=off", f"--init={path}", "--freeze=*",
              "--freeze=!fc.*", "--freeze=!layer4.*", "--optim.rates=layer4.*=0.1",
              "--optim.lr=0.01", "--inject=term:step=1"]

    run(ranks, 2, folder, *tuning, code=75)
    before = torch.load(path, weights_only=True)["state_dict"]
    path.unlink()  # it is no longer needed
    run(ranks, 2, folder, *tuning)

    text = capfd.readouterr().out
    assert "new head, initialized by the model: fc.weight (4, 512), in the file (1000, 512)" in text
    after = weights(folder, 2)
    assert after["fc.weight"].shape == (4, 512)
    for name, value in after.items():
        if not name.startswith("fc."):
            changed = not torch.equal(value, before[f"module.{name}"])
            assert changed == name.startswith("layer4."), name
