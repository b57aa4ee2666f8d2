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
    "MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
}


def test_without_a_launcher_a_process_is_the_only_rank() -> None:
    assert LaunchInfo.from_environment({"HOME": "/root"}) == LaunchInfo(
        rank=0, size=1, local_rank=0, local_size=1)


def test_torchruns_variables_are_read() -> None:
    assert LaunchInfo.from_environment(TORCHRUN) == LaunchInfo(
        rank=3, size=4, local_rank=1, local_size=2, master_address="node-0", master_port=29500,
        run_id="none", restart_count=1, max_restarts=3)


def test_only_our_own_launcher_knows_the_exit_codes() -> None:
    assert LaunchInfo.from_environment(TORCHRUN | {"TRAINER_LAUNCH": "1"}).knows_exit_codes
    assert not LaunchInfo.from_environment(TORCHRUN).knows_exit_codes


def test_only_our_own_launcher_tells_who_it_is() -> None:
    assert LaunchInfo.from_environment(TORCHRUN | {"TRAINER_LAUNCH_ID": "5c"}).launch_id == "5c"
    assert LaunchInfo.from_environment(TORCHRUN).launch_id is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                  "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    variables = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigError, match=f"{name} is not set.*torchrun"):
        LaunchInfo.from_environment(variables)


@pytest.mark.parametrize(("name", "value"), [
    ("RANK", "-1"), ("RANK", "two"), ("TORCHELASTIC_RESTART_COUNT", "1.5"),
])
def test_a_garbled_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
        LaunchInfo.from_environment(TORCHRUN | {name: value})


def test_cpu_is_taken_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=0, mps=False)
    assert _choose("auto", 2) == torch.device("cpu")


def test_a_rank_takes_the_cuda_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=2, mps=False)
    assert _choose("auto", 2) == torch.device("cuda", 1)
    assert _choose("cpu", 2) == torch.device("cpu")


def test_mps_is_taken_by_a_single_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=0, mps=True)
    assert _choose("auto", 1) == torch.device("mps")
    assert _choose("auto", 2) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device mps with 2 ranks.*reduce.*--device cpu"):
        _choose("mps", 2)


def test_fewer_cuda_devices_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=1, mps=False)
    with pytest.raises(ConfigError, match=r"2 ranks on this host but 1 CUDA device; .*"
                                          r"--nproc_per_node=1, or --device cpu"):
        _choose("auto", 2)


def test_cuda_that_is_not_there_is_refused_with_the_remedy(
        monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, cuda=0, mps=False)
    with pytest.raises(ConfigError, match=r"--device cuda: .*no CUDA device.*use --device cpu"):
        _choose("cuda", 1)
    with pytest.raises(ConfigError, match=r"--device tpu: .*auto, cpu, cuda or mps"):
        _choose("tpu", 1)


def test_the_cores_are_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [share_of_cores(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


def _choose(wanted: str, ranks: int) -> torch.device:
    return choose_device(wanted, ranks, ranks - 1, ranks)


def _machine(monkeypatch: pytest.MonkeyPatch, *, cuda: int, mps: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
