"""The process groups of one attempt, each with its own time limit, and the way to end them."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainer import network


class Groups:
    """Three groups of all ranks.

    Attributes:
        gradients: torch's default group: nccl on CUDA, gloo on CPU.
        figures: gloo, for tensors on the CPU; so that a sum of figures can never pair up with one
            of gradients when ranks get out of step.
        patient: gloo, for JSON and waiting, with a time limit of its own.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, *, timeout_s: float,
        patience_s: float, store_port: int,
    ) -> None:  # fmt: skip
        """Collective. Connects every rank with every other.

        Args:
            timeout_s: of gradients and figures; patience_s: of `patient`.
            store_port: connections from or to it are the store's, and are not ended by `cut`.
        """
        before = network.connections()
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
        self.patient = _gloo(patience_s)
        self._made = frozenset(
            inode
            for inode, found in network.connections().items()
            if inode not in before and store_port not in (found.local_port, found.peer_port)
        )
        # What a task forks (a pool, a manager) may outlive this rank, and would hide its death.
        os.register_at_fork(after_in_child=partial(network.let_go, self._made))

    def connections(self) -> list[int]:
        """Descriptors of the groups' connections, duplicated: to see the end of a peer."""
        return network.duplicates(self._made)

    def cut(self) -> None:
        """End all connections of the groups at once; nothing can be sent through them any more.

        Destroying a group would leave them open. The store's stay: it may be of use to a survivor.
        """
        network.shut_down(self._made)


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """The time limit of whatever is called in the group from now on, also by others."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timedelta(seconds=timeout_s))


def _gloo(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "this rank is not in a group of all ranks"
    return group
