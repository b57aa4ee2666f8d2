"""The plain-loop example runs under torchrun and computes the same as the trainer."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer.config.schema import Optim, Schedule
from trainer.optim import optimizers, schedules
from trainer.tasks.image_models import SmallCNN

EXAMPLE = Path(__file__).parents[2] / "examples" / "bare_loop.py"


@pytest.fixture(scope="module")
def bare_loop() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def test_the_bare_loop_trains_two_ranks_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               str(EXAMPLE), "--steps=6"]

    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250,
                           env=os.environ | {"PYTHONPATH": ""}, check=False)

    assert ended.returncode == 0, ended.stderr
    line, last = ended.stdout.splitlines()
    assert line.startswith("epoch 1: step 6, loss ")
    assert re.fullmatch(r"test accuracy 0\.\d{4}", last)
    assert float(last.split()[-1]) > 0.2, "ten classes: better than chance after six steps"


def test_the_bare_loop_has_the_model_rates_and_groups_of_the_recipe(bare_loop):
    example, ours = bare_loop.make_model(), SmallCNN("batch")
    assert [p.shape for p in example.parameters()] == [p.shape for p in ours.parameters()]

    groups, expected = (
        [([p.shape for p in g["params"]], g["weight_decay"], g["lr"], g["fused"], g["betas"],
          g["eps"]) for g in o.param_groups]
        for o in (bare_loop.make_optimizer(example), optimizers.make_optimizer(Optim(), ours)))
    assert groups == expected

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    factor = bare_loop.make_schedule(optimizer, 375).lr_lambdas[0]
    assert [factor(n) for n in range(380)] == [
        schedules.factor(Schedule(), n, epoch=75, total=375) for n in range(380)]


def test_a_step_of_the_bare_loop_updates_by_the_whole_batch(bare_loop):
    torch.manual_seed(0)
    images, labels = torch.randn(8, 1, 28, 28), torch.randint(10, (8,))
    weights = []
    for parts in (1, 4):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = bare_loop.make_schedule(optimizer, 10)
        batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        bare_loop.train_step(model, optimizer, schedule, batches, parts)
        weights.append(model[1].weight.detach())

    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-7)
