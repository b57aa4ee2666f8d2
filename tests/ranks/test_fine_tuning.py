"""Fine-tuning torchvision's ResNet-18 from a file of local weights."""

from __future__ import annotations

from pathlib import Path

import torch
from runs import train, weights

TASK = ["--task=resnet_task:ResNet", "--device=cpu", "--data.workers=0", "--batch.global-size=4",
        "--batch.micro-size=2", "--precision.channels-last=off"]  # fmt: skip


def save_random_weights(path: str) -> None:
    """Save weights of 1000 classes in the format of old scripts.

    Runs in a rank, since torchvision's import takes seconds.
    """
    from torchvision.models import resnet18

    torch.manual_seed(5)
    state = resnet18().state_dict()
    torch.save({"state_dict": {f"module.{n}": t for n, t in state.items()}}, path)


def test_a_new_head_learns_and_frozen_parts_stay_bit_identical(ranks, tmp_path, capfd):
    path, run = tmp_path / "resnet18.pth", tmp_path / "run"
    ranks(1, save_random_weights, str(path), group=False)
    tuning = [f"--init={path}", "--freeze=*", "--freeze=!fc.*", "--freeze=!layer4.*",
              "--optim.rates=layer4.*=0.1", "--steps=2", "--optim.lr=0.01", f"--run-dir={run}"]

    codes = ranks(2, train, *TASK, *tuning, "--inject=term:step=1", group=False)
    path.rename(tmp_path / "moved.pth")  # it is no longer needed
    codes += ranks(2, train, *TASK, *tuning, "--inject=term:step=1", group=False)

    assert codes == [75, 75, 0, 0]
    text = capfd.readouterr().out
    assert "new head, initialized by the model: fc.weight (4, 512), in the file (1000, 512)" in text
    before = torch.load(tmp_path / "moved.pth", weights_only=True)["state_dict"]
    after = weights(run, 2)
    assert after["fc.weight"].shape == (4, 512)
    for name, value in after.items():
        if not name.startswith("fc."):
            changed = not torch.equal(value, before[f"module.{name}"])
            assert changed == name.startswith("layer4."), name


def test_weights_that_do_not_fit_are_refused_before_the_run_folder_is_touched(ranks, tmp_path):
    run, path = tmp_path / "run", Path(tmp_path / "other.pt")
    torch.save({"model": {"layer.weight": torch.ones(2)}}, path)

    ended = ranks(2, train, "--task=tape_task:Tape", "--device=cpu", f"--init={path}",
                  f"--run-dir={run}", group=False)

    assert ended == [2, 2]
    assert not run.exists()
