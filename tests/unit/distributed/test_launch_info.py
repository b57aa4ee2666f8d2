"""What a rank reads from its launcher's variables, and which device and threads it takes."""

from __future__ import annotations

import os

import pytest
import torch

from trainer.distributed.device import choose_device, share_of_cores
from trainer.distributed.world import LaunchInfo
from trainer.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


def test_without_a_launcher_a_process_is_the_only_rank() -> None:
    assert LaunchInfo.from_environment({"HOME": "/root"}) == LaunchInfo(
        rank=0, size=1, local_rank=0, local_size=1)


def test_torchruns_variables_are_read() -> None:
    assert LaunchInfo.from_environment(TORCHRUN) == LaunchInfo(
        rank=3, size=4, local_rank=1, local_size=2, master_address="node-0", master_port=29500,
        run_id="none")


def test_our_own_launcher_tells_who_it_is_and_knows_the_exit_codes() -> None:
    plain = LaunchInfo.from_environment(TORCHRUN)
    ours = LaunchInfo.from_environment(
        TORCHRUN | {"TRAINER_LAUNCH": "1", "TRAINER_LAUNCH_ID": "5c"})
    assert (plain.knows_exit_codes, plain.launch_id) == (False, None)
    assert (ours.knows_exit_codes, ours.launch_id) == (True, "5c")


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
