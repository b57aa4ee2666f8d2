"""What the CUDA paths need of the process, tested without a card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.distributed import nccl

POISONED = """
import os, sys
from launch.fork_server import load_entry
assert load_entry("at_import:main", [])[0] == 0
import torch
if not os.fork():
    os._exit(torch.cuda._is_in_bad_fork())
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_module_that_asks_for_cuda_at_import_does_not_spoil_the_forks(tmp_path: Path) -> None:
    """torch refuses CUDA in a fork of a process that has initialised the driver."""
    (tmp_path / "at_import.py").write_text(
        "import torch\nFOUND = torch.cuda.is_available()\n\n\ndef main(argv):\n    return 0\n")

    done = subprocess.run([sys.executable, "-c", POISONED], cwd=Path(__file__).parents[3],
                          env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
                          timeout=200, check=False)

    assert done.returncode == 0


@pytest.mark.parametrize(("before", "kept"), [
    ({}, []), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, []),
    ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, []),
    ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, ["TORCH_NCCL_ENABLE_MONITORING=1"])])
def test_the_watchdog_of_nccl_is_off_unless_the_user_has_set_it(before, kept, monkeypatch) -> None:
    for name in nccl.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)

    assert nccl.configure() == kept
    expected = nccl.SETTINGS | dict(text.split("=") for text in kept)
    assert {name: os.environ[name] for name in nccl.SETTINGS} == expected
