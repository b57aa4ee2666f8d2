"""Orders by weight and length, several validation sets and metrics that are no means: exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, run, summary, until_done, validations, weights
from scored_task import Scored, predictions

from trainer.commands.compare import differences

TASK = ["--task=scored_task:Scored", "--device=cpu", "--batch.global-size=16",
        "--batch.micro-size=4", "--steps=14", "--eval.every=5", "--checkpoint.every=5",
        "--optim.lr=0.05", "--task.objects", "--checkpoint.keep=9",
        "--eval.best=val_noisy_accuracy:max"]  # fmt: skip


def assert_as_in_one_process(run: Path, line: dict[str, Any]) -> None:
    """The metrics of a validation are those of torchmetrics, updated batch by batch."""
    task = Scored(objects=True)
    model = task.model().eval()
    model.load_state_dict(weights(run, line["step"]))
    for name in ("", "clean", "noisy"):
        data: Any = task.dataset(f"validation:{name}" if name else "validation")
        metrics = task.metrics()
        for first in range(0, len(data), 8):
            batch = task.collate([data[i] for i in range(first, min(first + 8, len(data)))])
            with torch.no_grad():
                found = predictions(model(batch[0]), batch)
            for metric in metrics:
                metrics[metric].update(*found[metric])
        for metric, one in metrics.items():
            assert line[f"val_{name}_{metric}".replace("__", "_")] == float(one.compute()), metric


@pytest.mark.parametrize(("size", "sizes", "more"), [
    (2, [2], ["--data.sampler=like-length", "--data.workers=1"]),
    (1, [3, 2], ["--data.sampler=mixture", "--parallel.reduction=canonical"]),
], ids=["ddp", "canonical"])
def test_killed_runs_end_with_the_same_bits(ranks, undisturbed, tmp_path, size, sizes, more):
    straight = undisturbed(size, *TASK, *more)

    ended = until_done(ranks, sizes, tmp_path / "run", *TASK, *more,
                       "--inject=kill:step=7:rank=1", "--inject=kill:step=10:phase=evaluate")

    assert len(ended) == 3
    assert not list(differences(straight, tmp_path / "run"))
    [first, *_] = lines = validations(straight)
    for line in lines:
        assert_as_in_one_process(straight, line)
    assert [k for k in first if k.startswith("val_") and k.endswith(("loss", "samples"))] == [
        "val_loss", "val_samples", "val_clean_loss", "val_clean_samples", "val_noisy_loss",
        "val_noisy_samples"]
    assert len({first[f"val_{name}loss"] for name in ("", "clean_", "noisy_")}) == 3
    assert summary(straight)["best"]["metric"] == "val_noisy_accuracy"


def test_the_first_named_validation_set_is_the_main_one_where_there_is_no_other(ranks, tmp_path):
    folder = run(ranks, 1, tmp_path / "run", *TASK[:-1], "--task.no-with-main", "--steps=3")

    [line] = validations(folder)
    assert line["val_loss"] == line["val_clean_loss"] != line["val_noisy_loss"]


def test_validation_by_the_clock_is_between_two_steps_of_all_ranks(ranks, undisturbed, tmp_path):
    short = [*TASK, "--steps=8", "--eval.batches=2"]

    until_done(ranks, 2, tmp_path / "run", *short, "--eval.every=off", "--eval.every-s=1e-9",
               "--inject=kill:step=6:rank=1")

    each = undisturbed(2, *short, "--eval.every=1")
    assert metrics(tmp_path / "run") == metrics(each)
    assert {line["val_samples"] for line in validations(each)} == {16}
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert "--eval.every-s" in environment["determinism"]["why"]
