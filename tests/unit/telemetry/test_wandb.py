"""Sink for Weights & Biases: with a stand-in, and with wandb itself if it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wandb_stand_in import StandIn

from trainer.errors import ConfigError
from trainer.telemetry.wandb import ID, WandB, check_installed

STEP = {"step": 1, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": 2.0, "samples": 4}
TIMING = {"step": 0.5, "data": 0.1, "compute": 0.3}
VALIDATION = {"step": 10, "train_loss": 0.6, "val_loss": 0.4, "val_accuracy": 0.8,
              "val_samples": 10, "val_table": [[1, 0], [0, 1]]}


def shown(path: Path, monkeypatch, run_id: str) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sink = WandB(path, run_id, mode="offline", every=10, settings={"seed": 0},
                 class_names=("no", "yes"))
    for number in (1, 2, 10):
        sink.step({**STEP, "step": number}, TIMING)
    sink.validation(VALIDATION)
    sink.finish({}, {"final/test_accuracy": 0.8}, 10)
    sink.close()
    return stand_in


def test_steps_validations_and_final_metrics_are_logged(tmp_path, monkeypatch):
    calls, later = (shown(tmp_path, monkeypatch, run).calls for run in ("abc", "another"))

    for _, options in (calls[0], later[0]):  # each start of a run uses the id of the first
        assert (options["id"], options["resume"], options["mode"], options["dir"]) == (
            "abc", "allow", "offline", str(tmp_path))
    assert (tmp_path / ID).read_text() == "abc"
    assert [call[0] for call in calls] == ["init", "log", "log", "log", "summary", "finish"]
    assert [call[1] for call in calls if call[0] == "log"] == [1, 10, 10]
    assert calls[1][2]["train/loss"] == 0.5
    assert calls[1][2]["speed/samples_per_s"] == 8
    assert calls[3][2]["validation/accuracy"] == 0.8
    assert calls[3][2]["confusion"][0] == "image"


def test_a_run_without_wandb_installed_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    check_installed("off")
    with pytest.raises(ConfigError, match=r"--log.wandb online.*pip install '.\[wandb\]'"):
        check_installed("online")


REAL = """
import sys
from pathlib import Path
from trainer.telemetry.wandb import WandB
sink = WandB(Path(sys.argv[1]), "abcd1234", mode="offline", every=1, settings={"seed": 0},
             class_names=("no", "yes"))
for step in range(int(sys.argv[2]), int(sys.argv[3])):
    sink.step({"step": step, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": 2.0, "samples": 4},
              {"step": 0.5, "data": 0.1, "compute": 0.3})
sink.validation({"step": step, "train_loss": 0.6, "val_loss": 0.4, "val_samples": 10,
                 "val_table": [[1, 0], [0, 1]]})
sink.finish({}, {"final/test_accuracy": 0.8}, step)
sink.close()
print(sink._run.id)
"""


@pytest.mark.long
def test_wandb_itself_resumes_the_same_run_offline(tmp_path):
    pytest.importorskip("wandb")
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_CACHE_DIR": str(tmp_path / "cache")}

    ids = [subprocess.run([sys.executable, "-c", REAL, str(tmp_path), *steps], env=env, text=True,
                           capture_output=True, timeout=200, check=True).stdout.split()[-1]
            for steps in (("1", "4"), ("3", "6"))]

    assert ids == ["abcd1234", "abcd1234"]
    assert len(list(tmp_path.glob("wandb/offline-run-*-abcd1234/run-abcd1234.wandb"))) == 2
