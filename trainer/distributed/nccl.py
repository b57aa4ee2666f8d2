"""Settings of torch's NCCL backend, whose own watchdog must not end a rank that can still save."""

from __future__ import annotations

import os

SETTINGS = {
    # Not to abort NCCL after an error from a thread: queued kernels would run on garbage before
    # this process has saved the state on the device. (torchrun sets it to 1.)
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Not to end the process minutes after one slow collective (pytorch #155916).
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Not to end the process 100 ms after a CUDA error (pytorch #126544), or after a timeout (2.15).
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
}
_NO_CHANGE_OF_BITS = ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET", "NCCL_RAS",
                      "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
"""Variables, or their beginnings, that don't decide how NCCL sums."""
_SET_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def configure() -> list[str]:
    """Set the variables before the first group is made. Those of the user stay: they are returned,
    as NAME=VALUE, if they differ."""
    os.environ[_SET_BY_TORCHRUN] = SETTINGS[_SET_BY_TORCHRUN]
    return [f"{name}={found}" for name, value in SETTINGS.items()
            if (found := os.environ.setdefault(name, value)) != value]


def chosen_sums() -> str:
    """The user's variables that may decide in which order NCCL sums: NCCL_ALGO, NCCL_PROTO, and the
    numbers of channels and threads, transports, topology files, …"""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items())
             if name.startswith("NCCL_") and not name.startswith(_NO_CHANGE_OF_BITS)]
    return " ".join(found) or "none"
