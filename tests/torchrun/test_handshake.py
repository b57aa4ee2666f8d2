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


@pytest.mark.parametrize(("num_ranks", "times"), [(2, 1), *(
    pytest.param(size, 6, marks=[pytest.mark.long, pytest.mark.timeout(900)]) for size in (2, 3))])
def test_the_second_attempt_forms_its_group_after_a_sigkill(
    tmp_path: Path, num_ranks: int, times: int
) -> None:
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert _attempts_with_a_kill_in_the_first(folder, num_ranks, number % num_ranks) == [1]


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
