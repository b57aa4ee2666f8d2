"""What a rank reads from its launcher's variables, and which device and threads it takes."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

from trainer.distributed.device import auto_threads, choose_device, cpu_quota, share_of_cores
from trainer.distributed.world import LaunchInfo
from trainer.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


READ = LaunchInfo(rank=3, size=4, local_rank=1, local_size=2, master_address="node-0",
                  master_port=29500, run_id="none")


@pytest.mark.parametrize(("env", "expected"), [
    ({"HOME": "/root"}, LaunchInfo(rank=0, size=1, local_rank=0, local_size=1)),
    (TORCHRUN, READ),
    (TORCHRUN | {"TRAINER_LAUNCH": "1", "TRAINER_LAUNCH_ID": "5c"},
     dataclasses.replace(READ, knows_exit_codes=True, launch_id="5c"))])
def test_the_variables_of_a_launcher_are_read(env: dict[str, str], expected: LaunchInfo) -> None:
    assert LaunchInfo.from_environment(env) == expected


@pytest.mark.parametrize(("name", "value", "message"), [
    *((name, "", f"{name} is not set.*torchrun")
      for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")),
    ("RANK", "4", "RANK is '4'.*from 0 to 3"), ("WORLD_SIZE", "0", "WORLD_SIZE is '0'"),
    ("MASTER_PORT", "99999", "to 65535"), ("RANK", "-1", "RANK is '-1'"),
    ("RANK", "two", "RANK is 'two'"),
    ("LOCAL_RANK", "1.5", "LOCAL_RANK is '1.5'")])
def test_a_missing_or_garbled_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchInfo.from_environment(TORCHRUN | {name: value})


@pytest.mark.parametrize(("machine", "wanted", "ranks", "expected"), [
    ((0, False), "auto", 2, "cpu"), ((2, False), "auto", 2, "cuda:1"),
    ((2, False), "cpu", 2, "cpu"), ((0, True), "auto", 1, "mps"), ((0, True), "auto", 2, "cpu"),
    ((0, True), "mps", 2, r"--device mps with 2 ranks.*reduce.*--device cpu"),
    ((2, False), "auto", 3, r"3 ranks on this host but 2 CUDA devices; .*"
                            r"--nproc_per_node=2, or --device cpu"),
    ((1, False), "auto", 3, "cuda:0"),
    ((0, False), "cuda", 1, r"--device cuda: .*no CUDA device.*use --device cpu"),
    ((0, False), "tpu", 1, r"--device tpu: .*auto, cpu, cuda or mps")])
def test_a_rank_takes_its_device_or_says_what_to_do(
        machine: tuple[int, bool], wanted: str, ranks: int, expected: str,
        monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, mps = machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if "--" in expected:
        with pytest.raises(ConfigError, match=expected):
            choose_device(wanted, ranks, ranks - 1, ranks)
    else:
        assert choose_device(wanted, ranks, ranks - 1, ranks) == torch.device(expected)


def test_the_cores_are_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [share_of_cores(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


BY_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(("env", "ranks", "expected"), [
    ({}, 1, (8, "")), ({"OMP_NUM_THREADS": "3"}, 2, (3, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "4,2"}, 2, (4, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "1"}, 2, (1, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "1"} | BY_TORCHRUN, 2, (4, "")),  # torchrun sets it
    ({"OMP_NUM_THREADS": "1"} | BY_TORCHRUN, 1, (1, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "2"} | BY_TORCHRUN, 2, (2, "OMP_NUM_THREADS")),
    ({"OMP_NUM_THREADS": "1", "TRAINER_LAUNCH": "1"} | BY_TORCHRUN, 2, (1, "OMP_NUM_THREADS"))])
def test_the_number_of_threads_is_the_users_or_a_share_of_the_cores(
        env: dict[str, str], ranks: int, expected: tuple[int, str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert auto_threads(ranks, env) == expected


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5"])
def test_a_wrong_number_of_threads_in_the_environment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS is .*; use a number from 1 to 1024"):
        auto_threads(1, {"OMP_NUM_THREADS": text})


@pytest.mark.parametrize(("groups", "files", "cores"), [
    ("0::/", {}, math.inf), ("0::/", {"cpu.max": "max 100000"}, math.inf),
    ("0::/", {"cpu.max": "150000 100000"}, 1.5),
    ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "200000 100000",
                 "a/b/cpu.max": "400000 100000"}, 2.0),
    ("0::/on/the/host", {"cpu.max": "300000 100000"}, 3.0),
    ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                          "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                          "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                          "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 0.5),
    ("3:cpuset:/a\n2:cpuacct:/a", {"cpuacct/a/cpu.cfs_quota_us": "1"}, math.inf)])
def test_the_quota_of_a_container_is_that_of_its_tightest_control_group(
        groups: str, files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in {"groups": groups, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "groups", tmp_path) == cores
    assert cpu_quota(tmp_path / "absent", tmp_path) == math.inf
