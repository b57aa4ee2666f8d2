"""Ranks on two hosts (network namespaces) communicate through the interface that connects them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("handshake_worker.py")


@pytest.mark.long
def test_a_group_forms_between_hosts_whose_names_resolve_to_loopback(tmp_path: Path) -> None:
    with _two_hosts() as hosts:
        ranks = [_start(host, rank, tmp_path) for rank, host in enumerate(hosts)]
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    ended = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("attempt-*.json"))]
    assert len(ended) == 2
    assert ended[0] == ended[1]


def _start(host: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)}
    kept = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, str(WORKER), str(folder), "-1"],
        env=kept | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def _two_hosts() -> Iterator[list[str]]:
    hosts = [f"rank{number}-{os.getpid()}" for number in range(2)]
    ends = [f"veth{number}" for number in range(2)]
    try:
        for host in hosts:
            if not _ip("netns", "add", host):
                pytest.skip("network namespaces cannot be created here (needs root and ip)")
            assert _ip("-n", host, "link", "set", "lo", "up")
        assert _ip("link", "add", ends[0], "netns", hosts[0], "type", "veth",
                   "peer", "name", ends[1], "netns", hosts[1])
        for number, (host, end) in enumerate(zip(hosts, ends, strict=True), 1):
            assert _ip("-n", host, "address", "add", f"10.213.7.{number}/24", "dev", end)
            assert _ip("-n", host, "link", "set", end, "up")
        yield hosts
    finally:
        for host in hosts:
            _ip("netns", "del", host)


def _ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
