"""A restarted group forms immediately under plain torchrun, whose attempts share one store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("handshake_worker.py")


def test_the_second_attempt_forms_its_group_after_a_sigkill(tmp_path: Path) -> None:
    assert _attempts_with_a_kill_in_the_first(tmp_path, 2, victim=1) == [1]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_second_attempt_forms_its_group_6_times_of_6(tmp_path: Path, num_ranks: int) -> None:
    formed = []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        formed.append(_attempts_with_a_kill_in_the_first(folder, num_ranks, number % num_ranks))
    assert formed == [[1]] * 6


def _attempts_with_a_kill_in_the_first(folder: Path, num_ranks: int, victim: int) -> list[int]:
    """The numbers of the attempts in which every rank finished."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}",
               "--max-restarts=3", f"--master-port={free_port()}", str(WORKER), str(folder),
               str(victim)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=250,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ended: dict[int, list[dict[str, object]]] = {}
    for path in sorted(folder.glob("attempt-*.json")):
        ended.setdefault(int(path.name.split("-")[1]), []).append(json.loads(path.read_text()))
    whole = [attempt for attempt, ranks in ended.items() if len(ranks) == num_ranks]
    for ranks in ended.values():
        assert len({rank["nonce"] for rank in ranks}) == 1
        assert {rank["total"] for rank in ranks} == {
            float(sum(range(5 * num_ranks)))}  # every number of 0 … 5·W - 1 once
    return whole
