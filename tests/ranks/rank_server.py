"""The process that the ranks of a test are forked from, and what a rank does. Linux only.

It has torch imported and has run no tensor operation and started no thread, so a fork is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from machine import default_signals, free_port

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data",
           "torch._dynamo", "torch.utils.tensorboard", "safetensors.torch", "trainer.run.build",
           "trainer.loop", "trainer.__main__", "trainer.resilience.watchdog")
"""The first optimizer of a process imports torch._dynamo."""
LEAVE_S = 30.0  # how long a rank may take to destroy its group and exit
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h



@dataclasses.dataclass
class _Child:
    """The server's view of a rank."""

    rank: int
    pid: int
    pidfd: int
    connection: Connection
    output: Any
    result: bytes | None = None  # pickled {"value": …} or {"error": …}
    failed: bool = False
    ended: bool = False
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def serve(fd: int) -> NoReturn:
    """Answer requests until the other end is closed. Never starts a thread: it forks."""
    client = Connection(fd)
    os.set_inheritable(fd, False)
    default_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become ours
    for name in PRELOAD:
        importlib.import_module(name)
    # the first one reads its classes' sources
    importlib.import_module("trainer.config.command_line").parse_config([])
    while True:
        try:
            request = client.recv()
        except EOFError:
            os._exit(0)  # an ordinary exit with torch takes a second
        sys.path[:] = request["path"]
        # What the test's module imports is imported once, for all of its tests. If that fails, the
        # ranks fail in the same way and report it.
        with contextlib.suppress(BaseException):
            importlib.import_module(request["module"])
        threads = len(os.listdir("/proc/self/task"))
        client.send(f"importing {request['module']} started {threads - 1} threads, which a fork "
                    "doesn't copy: start them in functions" if threads > 1
                    else _run_ranks(request, client))


def _run_ranks(request: dict[str, Any], client: Connection) -> list[tuple[dict[str, Any], bytes]]:
    """Fork, wait and clean up; by rank: fields of Outcome, and the pickled rest of them."""
    children: list[_Child] = []
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        try:
            for rank in range(request["world_size"]):
                children.append(_fork(request, rank, folder, port, [client, *(
                    child.connection for child in children)]))
            _watch(children, client, request["timeout_s"], request["grace_s"])
            for child in children:
                child.output.seek(0)
                lines = child.output.read().decode(errors="replace").splitlines(keepends=True)
                child.fields["output"] = "".join(  # faulthandler adds a list of 30 names
                    line for line in lines if not line.startswith("Extension modules:"))
        finally:
            _kill_all_children(children)
    return [(child.fields | {"rank": child.rank}, child.result or pickle.dumps({}))
            for child in children]


def _fork(request: dict[str, Any], rank: int, folder: str, port: int,
          not_its: list[Connection]) -> _Child:
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    output = tempfile.TemporaryFile()  # noqa: SIM115, closed with its child
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        for connection in [*not_its, ours]:
            connection.close()
        _be_rank(request, rank, folder, port, theirs, output.fileno())
    theirs.close()
    return _Child(rank, pid, os.pidfd_open(pid), ours, output)


def _watch(children: list[_Child], client: Connection, timeout_s: float, grace_s: float) -> None:
    """Until every rank has ended or been killed; ranks with a result stay until all have one."""
    deadline = time.monotonic() + timeout_s
    failed = released = False
    while not all(child.ended for child in children):
        if not released and (failed or all(child.result for child in children)):
            released = True
            deadline = (min(deadline, time.monotonic() + grace_s) if failed
                        else time.monotonic() + LEAVE_S)
        if released:
            for child in children:
                if child.result and not child.connection.closed:
                    child.connection.close()  # its sign to leave
        alive = [child for child in children if not child.ended]
        ready = wait([client, *(child.pidfd for child in alive),
                      *(child.connection for child in alive
                        if not (child.result or child.connection.closed))],
                     timeout=max(0.0, deadline - time.monotonic()))
        if client in ready:  # it only speaks between runs: pytest is gone
            _kill_all_children(children)
            os._exit(1)
        for child in alive:
            if child.connection in ready:
                try:
                    child.failed, child.fields["at"], child.result = child.connection.recv()
                except (EOFError, ConnectionResetError):
                    child.connection.close()  # it died while it sent; its pidfd says how
            elif child.pidfd in ready:  # only now: what it sent before it died is read
                _note_end(child)
            failed = failed or child.failed
        if time.monotonic() >= deadline:
            _kill_hung([child for child in alive if not child.result] or alive)
            failed, deadline = True, time.monotonic() + LEAVE_S


def _note_end(child: _Child) -> None:
    info = os.waitid(os.P_PID, child.pid, os.WEXITED)
    assert info is not None
    child.ended = True
    by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    if not child.failed and (child.result is None or by_signal):
        child.failed, child.fields["at"] = True, time.monotonic()
        child.fields["signal" if by_signal else "exit_code"] = info.si_status


def _kill_hung(children: list[_Child]) -> None:
    """SIGABRT makes faulthandler write all stacks into the output, also of one that was stopped;
    SIGKILL is for the rest."""
    for number, seconds in ((signal.SIGABRT, 10.0), (signal.SIGKILL, 30.0)):
        for child in children:
            if not child.ended:
                os.kill(child.pid, number)
                os.kill(child.pid, signal.SIGCONT)
        limit = time.monotonic() + seconds
        for child in children:
            if not child.ended and wait([child.pidfd], timeout=max(0.0, limit - time.monotonic())):
                os.waitid(os.P_PID, child.pid, os.WEXITED)
                child.ended = True
                if not child.failed:
                    child.failed = True
                    child.fields |= {"hung": True, "at": time.monotonic()}


def _kill_all_children(children: list[_Child]) -> None:
    """Also what the ranks started: it is an orphan now, and orphans become the server's."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            pids = [int(pid) for pid in file.read().split()]
        if not pids:
            break
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            os.waitpid(pid, 0)
    for child in children:
        child.connection.close()
        child.output.close()
        os.close(child.pidfd)


def _be_rank(request: dict[str, Any], rank: int, folder: str, port: int, server: Connection,
             output_fd: int) -> NoReturn:
    failed = True
    try:
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(file=2)
        failed, result = _call(request, rank, folder, port)
        sys.stdout.flush()
        server.send((failed, time.monotonic(), result))
        if not failed:
            wait([server])  # closed by the server when every rank has its result
            import torch.distributed as dist
            if request["group"] and dist.is_initialized():
                dist.destroy_process_group()
    finally:
        # Not an ordinary exit: this is a copy of the server. A failed rank leaves at once, so that
        # its peers see its connections close.
        os._exit(int(failed))


def _call(request: dict[str, Any], rank: int, folder: str, port: int) -> tuple[bool, bytes]:
    """(whether it failed, pickled {"value": …} or {"error": …})."""
    world_size = request["world_size"]
    try:
        os.chdir(request["cwd"])
        os.environ.update(request["environ"])
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size),
                           "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        os.environ.update({k: v.replace("{rank}", str(rank)) for k, v in request["env"].items()})
        import numpy as np
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        warnings.simplefilter("error")
        # Loader workers are forked beside gloo's threads, which they don't touch (Python ≥ 3.12).
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        # On a machine of one core.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        function, args, kwargs = pickle.loads(request["call"])
        if request["group"]:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank,
                world_size=world_size, timeout=timedelta(seconds=request["timeout_s"] + 60))
        return False, pickle.dumps({"value": function(*args, **kwargs)})
    except BaseException as error:  # pytest's own outcomes are BaseExceptions
        text = traceback.format_exc()
        try:
            error.add_note(f"in rank {rank} of {world_size}:\n{text}")
            packed = pickle.dumps({"error": error})
            pickle.loads(packed)
        except Exception:  # an exception that doesn't survive pickling: its words do
            words = f"in rank {rank} of {world_size}:\n{text}"
            packed = pickle.dumps({"error": RuntimeError(words)})
        return True, packed
