"""Device and number of threads of a rank."""

from __future__ import annotations

import os

import torch

from trainer.errors import ConfigError


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
                                  f"CUDA device{'s' * (found != 1)}; each rank needs its own: "
                                  f"use --nproc_per_node={found}, or --device cpu.")
            return torch.device("cuda", local_rank)
        case "mps":
            if size > 1 or not torch.backends.mps.is_available():
                raise ConfigError(f"--device mps with {size} ranks: it needs an Apple GPU that "
                                  f"PyTorch {torch.__version__} can use, and one rank, since "
                                  "gloo and nccl cannot reduce its tensors; use --device cpu.")
            return torch.device("mps")
    raise ConfigError(f"--device {wanted}: unknown device; use auto, cpu, cuda or mps.")


def share_of_cores(local_size: int) -> int:
    """Intra-op threads of a rank: cores available to this process / ranks on this host, at least 1.
    OMP_NUM_THREADS is ignored, which torchrun sets to 1 unless the user has set it."""
    return max(1, len(os.sched_getaffinity(0)) // local_size)


def device_mb(device: torch.device) -> float:
    """Peak memory of this process's tensors on a GPU, in MB."""
    return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
