"""Process groups of an attempt and all its collectives, each with a timeout."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import errors
from trainer.distributed import allocator, nccl, serialization, sockets, torch_private
from trainer.distributed.device import auto_threads, choose_device
from trainer.distributed.rendezvous import join_attempt
from trainer.distributed.waits import WaitsFor, waiting_for
from trainer.errors import ConfigError, StopRequested, TrainerError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """Variables that the launcher set for this process; the defaults are a world of one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str = ""
    master_port: int = 0
    run_id: str | None = None  # None: not started by torch's elastic agent
    knows_exit_codes: bool = False  # the launcher is `python -m launch`
    hosts_store: bool = True  # rank 0 hosts the store; otherwise torch's elastic agent does
    grace_s: float = 30.0  # from the death of a rank until the launcher kills the others
    launch_id: str | None = None  # of one run of `python -m launch`, equal in all its attempts

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> LaunchInfo:
        """Read torchrun's variables."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()

        def number(name: str, default: str = "", *, low: int = 0, high: int = 2**31 - 1) -> int:
            text = env.get(name) or default
            if not (text.isdecimal() and low <= int(text) <= high):
                found = f"is {text!r}" if text else "is not set"
                raise ConfigError(f"environment variable {name} {found}; it must be a whole number "
                                  f"from {low} to {high}: start with torchrun or `python -m "
                                  "launch`, or set all of its variables.")
            return int(text)

        size = number("WORLD_SIZE", low=1)
        local_size = number("LOCAL_WORLD_SIZE", low=1, high=size)
        return cls(
            rank=number("RANK", high=size - 1), size=size,
            local_rank=number("LOCAL_RANK", high=local_size - 1), local_size=local_size,
            master_address=env.get("MASTER_ADDR", ""),
            master_port=number("MASTER_PORT", "0" if size == 1 else "", high=65535),
            run_id=env.get("TORCHELASTIC_RUN_ID"),
            knows_exit_codes=env.get("TRAINER_LAUNCH") == "1",
            hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            grace_s=float(env.get("TRAINER_GRACE_S", "30")),
            launch_id=env.get("TRAINER_LAUNCH_ID"),
        )


class World:
    """The ranks of one attempt. A context manager: closes on a normal exit, abandons on an error.

    There are three process groups of all ranks: for gradients; for other tensors on the CPU, so
    that a sum of metrics cannot pair with one of gradients if ranks are at different places; and
    for JSON and barriers, with the long timeout. Nothing is pickled. A world of one rank has no
    groups, and its collectives return what they would return among several ranks.
    """

    def __init__(self, launch: LaunchInfo, device: torch.device, threads: int) -> None:
        """Use `form` instead: it also connects the ranks."""
        self.launch, self.device = launch, device
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.threads = threads  # intra-op: they affect the bits, so a resumed run keeps them
        self.threads_reason = ""  # of their number; "": the flag, or the cores
        self.nonce = uuid.uuid4().hex  # new for each attempt, equal on all ranks
        self.store: dist.Store | None = None
        """Key-value store of this attempt; None in a world of one. It has one locked connection: a
        thread that may block in it uses `store.clone()`."""
        self.group: dist.ProcessGroup | None = None
        """For gradients (gloo on CPU, nccl on CUDA); None in a world of one, and on CUDA before
        `connect_gpus`."""
        self.users_nccl_settings: list[str] = []
        self.has_nodes = launch.local_size < launch.size
        self.is_main = launch.rank == 0
        self.writes_run_dir = self.is_main  # see `run_dir.enter`
        self.superseded = False  # by a newer attempt without this node: write nothing any more
        self._metrics: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        # Connections of the groups, without the store's: a survivor may need that.
        self._inodes: frozenset[int] = frozenset()
        self._current_timeout_s = self._long_timeout_s = 0.0
        self._ended: str | None = None

    @classmethod
    def form(
        cls, *, device: str = "auto", timeout_s: float = 60.0, join_timeout_s: float = 120.0,
        long_timeout_s: float = 1800.0, threads: int | str = "auto",
        launch: LaunchInfo | None = None,
    ) -> World:
        """Collective. Connect to the other ranks and create the process groups.

        Args:
            timeout_s: timeout of each collective on tensors (`--world.timeout-s`).
            join_timeout_s: how long to wait for ranks that start later.
            long_timeout_s: timeout of JSON collectives and `barrier`, and of all collectives inside
                `long_timeout()`.
        """
        launch = launch or LaunchInfo.from_environment()
        chosen = choose_device(device, launch.size, launch.local_rank, launch.local_size)
        count, reason = auto_threads(launch.local_size) if threads == "auto" else (int(threads), "")
        world = cls(launch, chosen, count)
        world.use_threads(count, reason)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        elif chosen.type == "cpu":
            allocator.keep_freed()
        if world.size > 1:
            world._current_timeout_s, world._long_timeout_s = timeout_s, long_timeout_s
            world._join(join_timeout_s)
        return world

    def _join(self, join_timeout_s: float) -> None:
        sockets.use_interface(
            self.launch.master_address, self.launch.master_port, on_one_host=not self.has_nodes)
        self.users_nccl_settings = nccl.configure()
        self.nonce, self.store = join_attempt(self.rank, self.size, join_timeout_s)
        on_cuda = self.device.type == "cuda"
        timeout, long_timeout = (
            timedelta(seconds=s) for s in (self._current_timeout_s, self._long_timeout_s))
        # The default group is the user's. On CUDA its NCCL connections are made at its first use,
        # and those of the gradients by `connect_gpus`.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=self.store, rank=self.rank,
            world_size=self.size, timeout=long_timeout)
        # A library may open and close connections of its own, as NCCL does: only those of gloo's
        # groups show the death of a peer.
        before = sockets.connections()
        self._metrics, self._control = (
            cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=limit))
            for limit in (timeout, long_timeout))
        self._refuse_different_devices()
        if not on_cuda:
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self._inodes = frozenset(
            inode for inode, ports in sockets.connections().items()
            if inode not in before and self.launch.master_port not in ports)
        # A child process of the task (a pool, a manager) may outlive this rank. Its inherited
        # copies of the connections would hide the death of the rank from the peers.
        os.register_at_fork(after_in_child=partial(sockets.release_inherited, self._inodes))

    def connect_gpus(self) -> None:
        """Collective. Make NCCL's connections. Its initialisation waits for a missing rank without
        a limit, so the watchdog must be running."""
        if self.size > 1 and self.device.type == "cuda":
            self._refuse_shared_device()
            with waiting_for(WaitsFor.DEVICE):
                self.group = cast(dist.ProcessGroup, dist.new_group(
                    backend="nccl", timeout=timedelta(seconds=self._long_timeout_s),
                    device_id=self.device))

    def _refuse_different_devices(self) -> None:
        """Collective. Refuse ranks on GPUs beside ranks on CPUs: no group has both."""
        everywhere = self.gather_json(self.device.type)
        if len(set(everywhere)) > 1:
            ranks = "; ".join(
                f"{kind}: {errors.listed(r for r, k in enumerate(everywhere) if k == kind)}"
                for kind in sorted(set(everywhere)))
            raise errors.from_rank(0, ConfigError(
                f"--device: the ranks have different devices ({ranks}). A host whose GPUs "
                "PyTorch does not find (see nvidia-smi there) has to be left out, or use "
                "--device cpu."))

    def _refuse_shared_device(self) -> None:
        """Collective. Refuse a GPU that several ranks use: NCCL would wait for ever."""
        everywhere = self.gather_json(str(torch.cuda.get_device_properties(self.device).uuid))
        ranks = [rank for rank, uuid in enumerate(everywhere) if uuid == everywhere[self.rank]]
        if len(ranks) > 1:
            raise ConfigError(
                f"--device cuda: ranks {', '.join(map(str, ranks))} have the same GPU "
                f"({everywhere[self.rank]}), and each rank needs its own: use as many ranks as "
                "there are GPUs, --device cpu, or a device for each rank (Slurm: "
                "--gpus-per-task=1).")

    def use_threads(self, threads: int, reason: str = "") -> None:
        self.threads, self.threads_reason = threads, reason
        torch.set_num_threads(threads)

    def supersede(self) -> None:
        self.superseded = True

    def write_run_dir(self, writes: bool) -> None:
        """Set whether this rank writes to its run folder: it does if it owns the lock."""
        self.writes_run_dir = writes

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Collective. Sum a tensor, such as a metric, over all ranks, in place and on the host."""
        with self._collective("all_sum"):
            if self.size > 1:
                on_host = tensor.detach().cpu().contiguous()  # gloo ignores strides
                dist.all_reduce(on_host, group=self._metrics)
                tensor.detach().copy_(on_host)
        return tensor

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. Copy the tensors of rank `source` to all ranks, in place and bit for bit.
        Other shapes or dtypes than those of `source` are a ValueError (on CPU)."""
        with self._collective("broadcast"):
            if self.size == 1:
                return
            for bucket in serialization.buckets(tensors):
                flat = serialization.pack(bucket)
                on_cpu = flat.device.type == "cpu"
                dist.broadcast(flat, source, group=self._metrics if on_cpu else self.group)
                if self.rank != source:
                    serialization.unpack(flat, bucket)

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Collective. The JSON value of rank `source`; on the source, too, tuples become lists."""
        with self._collective("broadcast_json"):
            if self.size == 1:
                return json.loads(json.dumps(value))
            data = json.dumps(value).encode() if self.rank == source else b""
            length = torch.tensor([len(data)])
            dist.broadcast(length, source, group=self._control)
            row = serialization.padded(data, int(length))
            dist.broadcast(row, source, group=self._control)
        return json.loads(row.numpy().tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        """Collective. The JSON values of all ranks, in their order."""
        data = json.dumps(value).encode()
        with self._collective("gather_json"):
            if self.size == 1:
                return [json.loads(data)]
            lengths = [int(length) for length in self._all_gather(torch.tensor([len(data)]))]
            rows = self._all_gather(serialization.padded(data, max(lengths)))
        return [json.loads(row.numpy().tobytes()[:length])
                for row, length in zip(rows, lengths, strict=True)]

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self._control)
        return rows

    def barrier(self) -> None:
        """Collective. Wait until all ranks have called it."""
        with self._collective("barrier"):
            if self.size > 1:
                dist.barrier(group=self._control)

    def raise_on_all_ranks(self, error: BaseException | None) -> None:
        """Collective. Raise on all ranks if any rank has an error: its own, or that of the first
        failed rank, of the same class if that is one of `trainer.errors`, otherwise PeerFailed."""
        if error is not None:
            try:
                self.gather_json((type(error).__name__, str(error)))
            except RuntimeError as broken:
                error.add_note(f"(and this error could not be sent to the other ranks: {broken})")
            raise error
        for rank, found in enumerate(self.gather_json(None)):
            if found is not None:
                name, message = found
                kind = getattr(errors, name, None)
                if isinstance(kind, type) and issubclass(kind, TrainerError):
                    raise errors.from_rank(rank, kind(f"{message} (rank {rank})"))
                raise errors.PeerFailed(f"rank {rank} failed: {name}: {message}")

    def fail_together(self, make: Callable[[], T]) -> T:
        """Collective. This rank's result of `make`; an error on one rank is raised on all."""
        try:
            made = make()
        except Exception as error:
            self.raise_on_all_ranks(error)
            raise
        self.raise_on_all_ranks(None)
        return made

    @contextlib.contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Use `long_timeout_s` for all collectives inside: ranks compile, evaluate or save."""
        before = self._current_timeout_s
        self._set_timeout(self._long_timeout_s)
        try:
            yield
        finally:
            self._set_timeout(before)

    def close(self, timeout_s: float | None = None) -> bool:
        """Collective. Wait for all ranks, then destroy the process groups; False if one is late.
        By default it waits `long_timeout_s`, since rank 0 may still be saving."""
        if self._ended:
            return False
        if self._control is not None:
            if timeout_s is not None:
                torch_private.set_timeout(self._control, timeout_s)
            try:
                self.barrier()
            except RuntimeError:
                self.abandon()
                return False
            dist.destroy_process_group()
        self._ended = "closed"
        return True

    def abandon(self) -> None:
        """Close all connections of the groups, in any thread: a peer is dead, or this rank leaves.
        Ranks that wait for this one notice within milliseconds, not after their timeout; destroying
        the groups would leave the connections open."""
        if not self._ended:
            self._ended = "abandoned"
            sockets.shut_down(self._inodes)

    def connections(self) -> list[int]:
        """Duplicated file descriptors of the connections to other ranks, to detect their end."""
        return sockets.duplicates(self._inodes)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: object) -> None:
        if error is None or isinstance(error, StopRequested):
            self.close()
        elif isinstance(error, TrainerError):
            self.close(5.0)  # most likely all ranks have this error; if not, do not wait long
        else:
            self.abandon()

    @contextlib.contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        if self._ended:
            why = ": connection closed by peer" if self._ended == "abandoned" else ""
            raise RuntimeError(
                f"World.{name}: the process group of this attempt is {self._ended}{why}")
        try:
            with waiting_for(WaitsFor.PEERS):
                yield
        except RuntimeError as error:
            error.add_note(f"(in World.{name}, rank {self.rank} of {self.size})")
            raise

    def _set_timeout(self, timeout_s: float) -> None:
        self._current_timeout_s = timeout_s
        # NCCL's timeout is always the long one: the watchdog finds a rank that is stuck.
        for group in (self._metrics, self.group if self.device.type == "cpu" else None):
            if group is not None and not self._ended:
                torch_private.set_timeout(group, timeout_s)
