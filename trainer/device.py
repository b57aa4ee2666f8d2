"""The device and the number of threads that one rank gets of its host."""

from __future__ import annotations

import os

import torch

from trainer.errors import ConfigError


def choose_device(wanted: str, *, size: int, local_rank: int, local_size: int) -> torch.device:
    """The device of this rank: `--device auto|cpu|cuda|mps`.

    Args:
        size: ranks in all; local_size: ranks on this host; local_rank: which of those this is.

    Raises:
        ConfigError: there is no such device here, or not one for each rank.
    """
    if wanted == "auto":
        alone_on_mps = size == 1 and torch.backends.mps.is_available()
        wanted = "cuda" if torch.cuda.is_available() else "mps" if alone_on_mps else "cpu"
    match wanted:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            if not torch.cuda.is_available():
                raise ConfigError(f"--device cuda: PyTorch {torch.__version__} sees no CUDA device "
                                  "here; use --device cpu or auto, or look at nvidia-smi, at "
                                  "CUDA_VISIBLE_DEVICES, and whether this is a CUDA build.")
            found = torch.cuda.device_count()
            if found < local_size:
                raise ConfigError(f"--device cuda: {local_size} ranks on this host but {found} "
                                  f"CUDA device{'s' * (found != 1)}, and each rank needs its own; "
                                  f"use --nproc_per_node={found}, or --device cpu.")
            return torch.device("cuda", local_rank)
        case "mps":
            if size > 1:
                raise ConfigError(f"--device mps with {size} ranks: neither gloo nor nccl can "
                                  "reduce tensors on mps, and a Mac has one such device; use one "
                                  "process (python -m trainer), or --device cpu.")
            if not torch.backends.mps.is_available():
                raise ConfigError("--device mps: there is no Apple GPU that PyTorch "
                                  f"{torch.__version__} can use; use --device cpu or auto.")
            return torch.device("mps")
    raise ConfigError(f"--device {wanted}: there is no such device; use auto, cpu, cuda or mps.")


def share_of_cores(local_size: int) -> int:
    """Intra-op threads for a rank: the cores this process may use / ranks on this host, or 1.

    The variable OMP_NUM_THREADS is no help here: torchrun sets it to 1 unless the user did.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // local_size)


def device_mb(device: torch.device) -> float:
    """The most memory that tensors of this process have had on a GPU, in MB."""
    return round(torch.cuda.max_memory_allocated(device) / 1e6, 1)
