"""This attempt's process group and every collective, by name, each with its timeout."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import allocator, errors, network, packing
from trainer.device import choose_device, share_of_cores
from trainer.errors import ConfigError, StopRequested, TrainerError
from trainer.groups import Groups, set_timeout
from trainer.handshake import meet
from trainer.waits import WaitsFor, waiting_for

_REMEDY = "start with torchrun or `python -m launch`, or set all of its variables"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher told this process; without a launcher, the only rank there is."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str = ""
    master_port: int = 0
    run_id: str | None = None
    """Not None under torch's elastic agent."""
    restart_count: int = 0
    max_restarts: int = 0
    knows_exit_codes: bool = False
    """Whether the launcher is `python -m launch`, which knows this trainer's exit codes."""
    hosts_store: bool = True
    """Whether rank 0 hosts the store, and not torch's elastic agent."""
    grace_s: float = 30.0
    """What the launcher gives the others after a rank's death before it kills them."""
    launch_id: str | None = None
    """Of `python -m launch`: equal in all attempts of the launcher's life, and in no other's."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read torchrun's variables; `environ` defaults to this process's own.

        Raises:
            ConfigError: some are missing, or are not what they must be.
        """
        env = os.environ if environ is None else environ
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()

        def number(name: str, low: int, high: int, default: str = "") -> int:
            text = env.get(name) or default
            if not text.isdecimal() or not low <= int(text) <= high:
                found = f"is {text!r}" if text else "is not set"
                raise ConfigError(f"environment variable {name} {found}; a whole number from {low} "
                                  f"to {high} is wanted: {_REMEDY}.")
            return int(text)

        most = 2**31 - 1
        size = number("WORLD_SIZE", 1, most)
        local_size = number("LOCAL_WORLD_SIZE", 1, size)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if size > 1 and not env.get(name):
                raise ConfigError(f"environment variable {name} is not set: {_REMEDY}.")
        return cls(
            rank=number("RANK", 0, size - 1),
            size=size,
            local_rank=number("LOCAL_RANK", 0, local_size - 1),
            local_size=local_size,
            master_address=env.get("MASTER_ADDR", ""),
            master_port=number("MASTER_PORT", 0, 65535, "0"),
            run_id=env.get("TORCHELASTIC_RUN_ID"),
            restart_count=number("TORCHELASTIC_RESTART_COUNT", 0, most, "0"),
            max_restarts=number("TORCHELASTIC_MAX_RESTARTS", 0, most, "0"),
            knows_exit_codes=env.get("TRAINER_LAUNCH") == "1",
            hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            grace_s=float(env.get("TRAINER_GRACE_S", "30")),
            launch_id=env.get("TRAINER_LAUNCH_ID"),
        )


class World:
    """One attempt's ranks. A context manager: an orderly end closes it, an error abandons it.

    Gradients, figures, and JSON each go through a process group of their own. Nothing is pickled.
    In a world of one rank there is no group, and each collective gives what it would give among
    several.

    Attributes:
        nonce: 32 hex digits, new for each attempt, equal on all ranks.
        store: shared by the ranks of this attempt alone; None in a world of one. One locked
            connection: a thread that may wait in it takes `store.clone()`.
        group: for gradients (gloo on CPU, nccl on CUDA); None in a world of one.
        threads: intra-op threads of this rank. They decide bits, so a resumed run keeps them.
        has_nodes: whether there are ranks on other nodes.
        keeps_folder: whether this rank writes a run folder (see `folder.enter`).
        stale: a newer attempt has begun without this node; nothing may be written any more.
        interface: through which network interface ranks talk, None: left to torch or the user.
    """

    def __init__(self, launch: Launch, device: torch.device, threads: int) -> None:
        """Prefer `form`."""
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.device = device
        self.threads = threads
        self.nonce = uuid.uuid4().hex
        self.store: dist.Store | None = None
        self.group: dist.ProcessGroup | None = None
        self.interface: str | None = None
        self.has_nodes = launch.local_size < launch.size
        self.keeps_folder, self.stale = launch.rank == 0, False
        self._groups: Groups | None = None
        self._timeout_s = self._limit_s = self._patience_s = 0.0
        self._ended: str | None = None

    @classmethod
    def form(
        cls, *, device: str = "auto", timeout_s: float = 60.0, join_timeout_s: float = 120.0,
        patience_s: float = 1800.0, threads: int | None = None, launch: Launch | None = None,
    ) -> World:
        """Collective. Find the other ranks and form the groups.

        Args:
            timeout_s: of each collective on tensors (`--world.timeout-s`).
            join_timeout_s: how long to wait for ranks that start later.
            patience_s: of JSON, `barrier` and `agree`, and of all within `patient()`.
            threads: default: the cores this process may use / ranks on this host.

        Raises:
            ConfigError: the launcher's variables or the device are wrong.
            TimeoutError: names the ranks that never came.
            RuntimeError: no store answers at MASTER_ADDR:MASTER_PORT.
        """
        launch = launch or Launch.from_environment()
        place = choose_device(device, size=launch.size, local_rank=launch.local_rank,
                              local_size=launch.local_size)
        world = cls(launch, place, threads or share_of_cores(launch.local_size))
        torch.set_num_threads(world.threads)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        elif place.type == "cpu":
            allocator.keep_freed()
        if world.size > 1:
            world._timeout_s = world._limit_s = timeout_s
            world._patience_s = patience_s
            world._join(join_timeout_s)
        return world

    def _join(self, join_timeout_s: float) -> None:
        self.interface = network.use_interface(
            self.launch.master_address, self.launch.master_port, on_one_host=not self.has_nodes)
        # torchrun sets 1: then torch's own thread would abort NCCL, and queued kernels run on
        # garbage before anybody could save what the device still holds.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self.nonce, self.store = meet(self.rank, self.size, join_timeout_s)
        self._groups = Groups(
            self.store, self.rank, self.size, self.device, timeout_s=self._timeout_s,
            patience_s=self._patience_s, store_port=self.launch.master_port,
        )  # fmt: skip
        self.group = self._groups.gradients

    def use_threads(self, threads: int) -> None:
        """Compute with this many intra-op threads from now on."""
        if threads != self.threads:
            self.threads = threads
            torch.set_num_threads(threads)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Collective. In place: the sum over all ranks, for figures such as a validation's.

        Any shape and number type, the same on all ranks. A tensor on a GPU is summed on the host
        (which waits for the device); gradients go through `group`.
        """
        with self._collective("all_sum") as groups:
            if groups is not None:
                own = tensor.detach()
                on_host = own.cpu().contiguous()  # gloo sums memory, whatever the strides say
                dist.all_reduce(on_host, group=groups.figures)
                if on_host.data_ptr() != own.data_ptr():
                    own.copy_(on_host)
        return tensor

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Collective. In place: each tensor becomes bit for bit that of rank `source`.

        Any shapes and dtypes, the same on all ranks; all on the CPU or all on this rank's device.

        Raises:
            ValueError: on CPU, where shapes or dtypes are not those of `source`.
        """
        with self._collective("broadcast") as groups:
            if groups is None:
                return
            for bucket in packing.buckets(tensors):
                flat = packing.pack(bucket)
                on_cpu = flat.device.type == "cpu"
                dist.broadcast(flat, source, group=groups.figures if on_cpu else groups.gradients)
                if self.rank != source:
                    packing.unpack(flat, bucket)

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """Collective. The JSON value of rank `source`, on all ranks; the others' is ignored.

        Also the source gets it back as JSON gives it: tuples are lists, keys are strings.
        """
        with self._collective("broadcast_json") as groups:
            if groups is None:
                return packing.decode(packing.encode(value))
            data = packing.encode(value) if self.rank == source else b""
            length = torch.tensor([len(data)])
            dist.broadcast(length, source, group=groups.patient)
            row = packing.padded(data, int(length))
            dist.broadcast(row, source, group=groups.patient)
        return packing.decode(row.numpy().tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        """Collective. The JSON values of all ranks, by rank, on all ranks."""
        data = packing.encode(value)
        with self._collective("gather_json") as groups:
            if groups is None:
                return [packing.decode(data)]
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=groups.patient)
            own = packing.padded(data, max(int(length) for length in lengths))
            rows = [torch.empty_like(own) for _ in lengths]
            dist.all_gather(rows, own, group=groups.patient)
        return [packing.decode(row.numpy().tobytes()[:int(length)])
                for row, length in zip(rows, lengths, strict=True)]

    def barrier(self) -> None:
        """Collective. Wait until all ranks are here."""
        with self._collective("barrier") as groups:
            if groups is not None:
                dist.barrier(group=groups.patient)

    def agree(self, error: BaseException | None) -> None:
        """Collective. Returns if no rank has an error; otherwise every rank raises.

        A rank with an error raises that. The others raise one of the same class if it is one of
        `trainer.errors`, else PeerFailed, with the message of the first rank that failed.
        """
        report = None if error is None else (type(error).__name__, str(error))
        reports: list[Any] = []
        try:
            reports = self.gather_json(report)
        except RuntimeError as broken:
            if error is None:
                raise
            error.add_note(f"(and the other ranks could not be told: {broken})")
        if error is not None:
            raise error
        for rank, found in enumerate(reports):
            if found is not None:
                name, message = found
                kind = getattr(errors, name, None)
                if isinstance(kind, type) and issubclass(kind, TrainerError):
                    raise errors.told_by(rank, kind(f"{message} (rank {rank})"))
                raise errors.PeerFailed(f"rank {rank} failed: {name}: {message}")

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """All collectives within may take `patience_s`: while ranks compile, evaluate or save."""
        before = self._limit_s
        self._limit(self._patience_s)
        try:
            yield
        finally:
            self._limit(before)

    def close(self, timeout_s: float | None = None) -> bool:
        """Collective. The orderly end: wait for all ranks, then let the groups go.

        Returns:
            whether all ranks came within `timeout_s` (default: `patience_s`; rank 0 may be saving).
        """
        if self._ended:
            return False
        if self._groups is not None:
            if timeout_s is not None:
                set_timeout(self._groups.patient, timeout_s)
            try:
                self.barrier()
            except RuntimeError:
                self.abandon()
                return False
            dist.destroy_process_group()
        self._ended = "closed"
        return True

    def abandon(self) -> None:
        """A peer is dead or this rank leaves: end all connections of the groups, at once.

        Every rank that waits for this one notices within milliseconds, instead of when its own
        time is up. No collective may follow. May be called in any thread.
        """
        if not self._ended:
            self._ended = "abandoned"
            if self._groups is not None:
                self._groups.cut()

    def connections(self) -> list[int]:
        """Descriptors of the connections to the other ranks, so that their ends can be watched."""
        return [] if self._groups is None else self._groups.connections()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, StopRequested):
            self.close()
        elif isinstance(error, TrainerError):
            self.close(5.0)  # most likely all ranks have come to it; if not: not for long
        else:
            self.abandon()

    @contextlib.contextmanager
    def _collective(self, name: str) -> Iterator[Groups | None]:
        if self._ended:
            why = ": connection closed by peer" if self._ended == "abandoned" else ""
            raise RuntimeError(
                f"World.{name}: the process group of this attempt is {self._ended}{why}")
        try:
            with waiting_for(WaitsFor.PEERS):
                yield self._groups
        except RuntimeError as error:
            error.add_note(f"(in World.{name}, rank {self.rank} of {self.size})")
            raise

    def _limit(self, timeout_s: float) -> None:
        self._limit_s = timeout_s
        if self._groups is not None and not self._ended:
            set_timeout(self._groups.gradients, timeout_s)
            set_timeout(self._groups.figures, timeout_s)
