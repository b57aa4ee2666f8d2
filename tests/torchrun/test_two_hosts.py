"""Ranks on two hosts (network namespaces) communicate through the interface that connects them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, two_hosts

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("handshake_worker.py")


@pytest.mark.long
def test_a_group_forms_between_hosts_whose_names_resolve_to_loopback(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        ranks = [_start(hosts, rank, tmp_path) for rank in range(2)]
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    ended = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("attempt-*.json"))]
    assert len(ended) == 2
    assert ended[0] == ended[1]


def _start(hosts: Hosts, rank: int, folder: Path) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
    kept = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
    return subprocess.Popen(
        [*hosts.enter(rank), sys.executable, str(WORKER), str(folder), "-1"],
        env=kept | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
