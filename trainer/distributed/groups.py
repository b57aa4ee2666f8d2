"""Process groups of an attempt: creation, timeouts, and immediate shutdown."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainer.distributed import sockets


class Groups:
    """Three process groups, each of all ranks.

    Attributes:
        gradients: torch's default group: nccl on CUDA, gloo on CPU.
        figures: gloo, for metrics and other tensors on the CPU. A separate group, so that a sum of
            metrics cannot pair with a sum of gradients if ranks are not at the same place.
        patient: gloo, for JSON and barriers, with the long timeout.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, *, timeout_s: float,
        long_timeout_s: float, store_port: int,
    ) -> None:  # fmt: skip
        """Collective. Connect every rank with every other rank.

        Args:
            timeout_s: timeout of `gradients` and `figures`.
            long_timeout_s: timeout of `patient`.
            store_port: port of the store; `cut` keeps connections from and to it.
        """
        before = sockets.connections()
        on_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_cuda else None,
        )
        assert dist.group.WORLD is not None
        self.gradients = dist.group.WORLD
        self.figures = _gloo(timeout_s)
        self.patient = _gloo(long_timeout_s)
        self._inodes = frozenset(
            inode
            for inode, found in sockets.connections().items()
            if inode not in before and store_port not in (found.local_port, found.peer_port)
        )
        # A child process of the task (a pool, a manager) may outlive this rank. Its inherited
        # copies of the connections would hide the death of the rank from the peers.
        os.register_at_fork(after_in_child=partial(sockets.let_go, self._inodes))

    def connections(self) -> list[int]:
        """Duplicated file descriptors of the groups' connections, to detect the end of a peer."""
        return sockets.duplicates(self._inodes)

    def cut(self) -> None:
        """Shut down all connections of the groups at once; they cannot send any more.

        Destroying a group would leave them open. Connections of the store stay open: a survivor
        may need it.
        """
        sockets.shut_down(self._inodes)


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set the timeout of all later collectives of the group, whoever calls them."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timedelta(seconds=timeout_s))


def _gloo(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "this rank is not in a group of all ranks"
    return group
