"""A user's script that calls `train()`, under plain torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from runs import events

from trainer.commands.compare import differences

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Config, Outcome, train
from trainer.config.schema import Batch, WorldConfig

torch.manual_seed(0)
x = torch.randn(64, 8)

class Mine:
    def model(self):
        return nn.Linear(8, 1)
    def dataset(self, split):
        return TensorDataset(x, x.sum(1, keepdim=True)) if split == "train" else None
    def loss(self, model, batch):
        return Outcome((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))

for name in sys.argv[1:]:
    done = train(Config(
        task=Mine(), run=name, steps=12, device="cpu", batch=Batch(global_size=8, micro_size=4),
        world=WorldConfig(threads=1), inject=("kill:rank=1:step=5",) if name == "killed" else ()))
    print(name, done.summary["step"])
train(Config(task=Mine(), run="refused", batch=Batch(global_size=4, micro_size=4)))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_trains_twice_and_survives_a_kill_and_a_bad_config_is_refused(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max-restarts=3", "script.py", "straight", "killed"]

    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False)

    assert ended.returncode == 1, "torchrun knows no other code"
    assert ended.stdout.count("killed 12") == 2, ended.stderr
    assert ended.stderr.count("error: --nproc_per_node: 2 ranks") == 1
    assert {e["attempt"] for e in events(tmp_path / "killed", "start")} == {0, 1}
    assert not (tmp_path / "refused").exists()
    assert not list(differences(tmp_path / "straight", tmp_path / "killed"))
