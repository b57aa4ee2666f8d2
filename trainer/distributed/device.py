"""Device and number of threads of a rank."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trainer.errors import ConfigError

OMP = "OMP_NUM_THREADS"


def choose_device(wanted: str, size: int, local_rank: int, local_size: int) -> torch.device:
    """The device of this rank: `--device auto|cpu|cuda|mps`."""
    if wanted == "auto":
        alone_on_mps = size == 1 and torch.backends.mps.is_available()
        wanted = "cuda" if torch.cuda.is_available() else "mps" if alone_on_mps else "cpu"
    match wanted:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"--device cuda: PyTorch {torch.__version__} finds no CUDA "
                                  "device; use --device cpu or auto, or check nvidia-smi, "
                                  "CUDA_VISIBLE_DEVICES, and whether this is a CUDA build.")
            found = torch.cuda.device_count()
            if found == 1:  # a scheduler may give each rank a device of its own (see `World`)
                return torch.device("cuda", 0)
            if found < local_size:
                raise ConfigError(f"--device cuda: {local_size} ranks on this host but {found} "
                                  "CUDA devices; each rank needs its own: use "
                                  f"--nproc_per_node={found}, or --device cpu.")
            return torch.device("cuda", local_rank)
        case "mps":
            if size > 1 or not torch.backends.mps.is_available():
                raise ConfigError(f"--device mps with {size} ranks: it needs an Apple GPU that "
                                  f"PyTorch {torch.__version__} can use, and one rank, since "
                                  "gloo and nccl cannot reduce its tensors; use --device cpu.")
            return torch.device("mps")
    raise ConfigError(f"--device {wanted}: unknown device; use auto, cpu, cuda or mps.")


def auto_threads(local_size: int, env: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Number of threads of a rank for `--world.threads auto`, and its reason unless that is the
    number of cores: OMP_NUM_THREADS, or the share of a rank in the cores."""
    text = env.get(OMP, "").split(",")[0].strip()
    by_torchrun = ("TORCHELASTIC_RUN_ID" in env and "TRAINER_LAUNCH" not in env
                   and local_size > 1)  # torchrun sets 1, unless it is set
    if not text or (text == "1" and by_torchrun):
        limited = cpu_quota() < len(os.sched_getaffinity(0))
        return share_of_cores(local_size), "the CPU quota" * limited
    if not (text.isdecimal() and 1 <= int(text) <= 1024):
        raise ConfigError(f"environment variable {OMP} is {text!r}; use a number from 1 to 1024, "
                          "or unset it.")
    return int(text), OMP


def share_of_cores(local_size: int) -> int:
    """Cores for one of the ranks on this host, at least 1: those that this process may use, also
    under the CPU quota of a container."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_quota()) / local_size))


def cpu_quota(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
              ) -> float:  # fmt: skip
    """Cores that the control groups of this process allow, infinite without a limit."""
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / controllers
            # In a container, the path may be that of the host, where only `top` exists.
            folder = top / path.lstrip("/")
            for place in (folder, *folder.parents[:len(folder.parts) - len(top.parts)]):
                quotas += _quota_in(place)
    return min(quotas)


def _quota_in(folder: Path) -> Iterator[float]:
    """The CPU limit of a control group, of version 2 or 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def describe_gpus(device: torch.device, local_size: int) -> str:
    """The GPUs of the ranks on this host, and whether each reaches the memory of every other one
    directly: NCCL plans its sums by that. Unknown if each rank sees only its own."""
    links, numbers = "", range(local_size)
    if 1 < local_size <= torch.cuda.device_count():
        direct = all(torch.cuda.can_device_access_peer(one, other)
                     for one in numbers for other in numbers if one != other)
        links = f", {'with' if direct else 'without'} peer access"
    return f"{local_size} × {torch.cuda.get_device_name(device)}{links}"


def driver_version() -> str | None:
    """Version of NVIDIA's driver; None if unknown."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


def device_mb(device: torch.device) -> float:
    """Peak memory of this process's tensors on a GPU, in MB."""
    return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
