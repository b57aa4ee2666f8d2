"""What the CUDA paths need of the process, tested without a card."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from trainer.commands.train import RankProcess, Training
from trainer.config.schema import Config
from trainer.distributed import nccl
from trainer.distributed import world as world_module
from trainer.distributed.waits import WaitsFor, waits_for
from trainer.distributed.world import LaunchInfo, World
from trainer.errors import ConfigError
from trainer.optim.precision import set_determinism
from trainer.resilience import watchdog
from trainer.resilience.stop_signals import StopSignals
from trainer.run import circumstances
from trainer.telemetry.events import Log

POISONED = """
import os, sys
from launch.fork_server import load_entry
code, _ = load_entry("at_import:main", [])
if code:
    sys.exit(code)
import torch
if not os.fork():
    os._exit(torch.cuda._is_in_bad_fork())
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(("env", "code"), [({}, 0), ({"PYTORCH_NVML_BASED_CUDA_CHECK": "0"}, 2)])
def test_a_module_that_asks_for_cuda_at_import_does_not_spoil_the_forks(
    env: dict[str, str], code: int, tmp_path: Path
) -> None:
    """torch refuses CUDA in a fork of a process that has initialised the driver. Where that can't
    be avoided, nothing is started."""
    (tmp_path / "at_import.py").write_text(
        "import torch\nFOUND = torch.cuda.is_available()\n\n\ndef main(argv):\n    return 0\n")

    done = subprocess.run([sys.executable, "-c", POISONED], cwd=Path(__file__).parents[3],
                          env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", **env},
                          timeout=200, check=False, capture_output=True, text=True)

    assert done.returncode == code
    assert ("has initialized CUDA" in done.stderr) is bool(code)


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
    expected = dict.fromkeys((
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "TORCH_NCCL_TEARDOWN_ON_TIMEOUT"), "0")
    expected |= dict(text.split("=") for text in kept)
    assert {name: os.environ[name] for name in expected} == expected


def test_device_and_deterministic_kernels_are_set_before_the_groups_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch excludes NCCL's algorithm NVLS when its first group is made (pytorch #156381)."""
    seen = list[object]()

    def join(world: World, timeout_s: float) -> None:
        seen.extend((torch.are_deterministic_algorithms_enabled(),
                     os.environ["CUBLAS_WORKSPACE_CONFIG"]))
        raise ConfigError("seen")

    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2,
                        "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(world_module, "choose_device", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(str(device)))
    monkeypatch.setattr(World, "_join", join)
    threads = torch.get_num_threads()
    set_determinism(False)
    try:
        with pytest.raises(ConfigError, match="seen"):
            RankProcess(StopSignals())._train([f"--run-dir={tmp_path}"], None)
    finally:
        set_determinism(False)
        torch.set_num_threads(threads)

    assert seen == ["cuda:1", True, ":4096:8"]


@pytest.mark.parametrize(("reduction", "size", "more"), [
    ("ddp", 16, {"NCCL": "2.30.7", "the variables of NCCL": "NCCL_ALGO=Ring NCCL_NTHREADS=256",
                 "the GPUs of the hosts": "8 × NVIDIA H100, with peer access; 8 × NVIDIA H100, "
                                          "without peer access"}),
    ("ddp", 1, {}), ("canonical", 16, {})])
def test_what_decides_the_order_of_sums_on_gpus_is_recorded(
    reduction: str, size: int, more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def access(one: int, other: int) -> bool:
        assert one != other
        return True

    for name, value in (("get_device_name", lambda device: "NVIDIA H100"),
                        ("device_count", lambda: 8), ("can_device_access_peer", access)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    for name, value in (("ALGO", "Ring"), ("NTHREADS", "256"), ("DEBUG_SUBSYS", "INIT"),
                        ("SOCKET_IFNAME", "=lo")):
        monkeypatch.setenv(f"NCCL_{name}", value)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    world = World(LaunchInfo(size=size, local_size=min(size, 8)), torch.device("cuda"), 1)
    others = [None] * 7 + ["8 × NVIDIA H100, without peer access"] + [None] * 7
    monkeypatch.setattr(world, "gather_json", lambda value: [value, *others])
    monkeypatch.setattr(world, "broadcast_json", lambda value: value)
    config = SimpleNamespace(parallel=SimpleNamespace(reduction=reduction))

    found = circumstances._of_gpus(SimpleNamespace(world=world, config=config))

    assert found.pop("CUDA") == torch.version.cuda
    assert "NVIDIA driver" in found
    del found["NVIDIA driver"]
    assert found == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | more


def test_nccl_is_initialised_under_the_watchdog_since_it_waits_for_a_missing_rank(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(LaunchInfo(size=2, local_size=2), torch.device("cuda"), 1)
    world._current_timeout_s, world._long_timeout_s = 60.0, 1800.0
    seen = list[object]()

    class Stopped(Exception):
        pass

    class Watching:
        def __init__(self, *arguments: object, **options: object) -> None: ...
        def __enter__(self) -> None:
            seen.append("watchdog")
        def __exit__(self, *arguments: object) -> None: ...

    def new_group(**options: object) -> None:
        seen.append(waits_for(threading.get_ident(), sys._getframe()))
        assert options == {"backend": "nccl", "device_id": world.device,
                           "timeout": timedelta(seconds=1800)}  # the watchdog is faster
        raise Stopped

    monkeypatch.setattr(watchdog, "Watchdog", Watching)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(uuid="own"))
    monkeypatch.setattr(world, "gather_json", lambda value: [value, "other"])
    with pytest.raises(Stopped):
        Training(Log(level="error"), StopSignals()).run(Config(), world)

    assert seen == ["watchdog", WaitsFor.DEVICE]


def test_two_ranks_with_the_same_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(LaunchInfo(size=3, local_size=3), torch.device("cuda"), 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(uuid="own"))
    monkeypatch.setattr(world, "gather_json", lambda value: [value, "other", value])

    with pytest.raises(ConfigError, match="ranks 0, 2 have the same GPU"):
        world.connect_gpus()


def test_ranks_on_gpus_and_ranks_on_cpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device auto` takes the CPU on a host whose driver fails; the groups would never form."""
    world = World(LaunchInfo(size=3, local_size=3), torch.device("cpu"), 1)
    made = list[str]()
    monkeypatch.setattr(world_module, "join_attempt", lambda *_: ("nonce", HashStore()))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: None)
    monkeypatch.setattr(dist, "new_group", lambda *_, **options: made.append(options["backend"]))
    monkeypatch.setattr(world, "gather_json", lambda value: [value, "cuda", value])

    with pytest.raises(ConfigError, match=r"\(cpu: 0, 2; cuda: 1\)"):
        world._join(1.0)
    assert made == ["gloo", "gloo"]
