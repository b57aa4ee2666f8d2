"""The process that the ranks of a test are forked from, and what a rank does. Linux only.

It has torch imported and has run no tensor operation and started no thread, so a fork is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from machine import default_signals, free_port

PRELOAD = ("numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data",
           "torch._dynamo", "torch.utils.tensorboard", "safetensors.torch", "trainer.run.build",
           "trainer.loop", "trainer.__main__", "trainer.resilience.watchdog")
"""The first optimizer of a process imports torch._dynamo."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

Living = dict[int, tuple[int, int]]
"""pidfd → rank, pid."""


def serve(fd: int) -> NoReturn:
    """Answer requests until the other end is closed. Never starts a thread: it forks."""
    client = Connection(fd)
    os.set_inheritable(fd, False)
    default_signals()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become ours
    for name in PRELOAD:
        importlib.import_module(name)
    # The first call reads the sources of its classes.
    importlib.import_module("trainer.config.command_line").parse_config([])
    gc.collect()
    gc.freeze()  # as the launcher's fork server does
    while True:
        try:
            request = client.recv()
        except EOFError:
            os._exit(0)  # an ordinary exit with torch takes a second
        sys.path[:] = request["path"]
        # Imported once for all tests of the module. If that fails, the ranks report it.
        with contextlib.suppress(BaseException):
            importlib.import_module(request["module"])
        client.send(_run_ranks(request, client))


def _run_ranks(request: dict[str, Any], client: Connection) -> list[dict[str, Any]]:
    """Fork, wait and clean up; by rank: fields of Outcome, some of them pickled in `result`."""
    # Not a TemporaryDirectory, which a process that a rank forks would delete at its own exit.
    folder, port, living = Path(tempfile.mkdtemp()), free_port(), Living()
    try:
        for rank in range(request["world_size"]):
            if (pid := os.fork()) == 0:
                client.close()
                _be_rank(request, rank, folder, port)
            living[os.pidfd_open(pid)] = rank, pid
        ended = _watch(living, folder, client, request["timeout_s"], request["grace_s"])
    finally:
        _kill_all_children()
        shutil.rmtree(folder)
    return sorted(ended, key=lambda fields: fields["rank"])


def _watch(living: Living, folder: Path, client: Connection, timeout_s: float,
           grace_s: float) -> list[dict[str, Any]]:
    """Until every rank has ended or been killed."""
    deadline_s, ended = time.monotonic() + timeout_s, []
    while living:
        ready = wait([client, *living], timeout=max(0.0, deadline_s - time.monotonic()))
        if client in ready:  # it only speaks between runs: pytest is gone
            _kill_all_children()
            os._exit(1)
        if not ready:
            _kill_hung(living)
        for pidfd in ready or list(living):
            rank, pid = living.pop(pidfd)
            os.close(pidfd)
            ended.append(_ended(rank, pid, folder, killed=not ready))
            if ended[-1].pop("failed"):
                (folder / "failed").touch()
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
    return ended


def _kill_hung(living: Living) -> None:
    """SIGABRT makes faulthandler write all stacks into the output, SIGKILL is for the rest."""
    for number, seconds in ((signal.SIGABRT, 10.0), (signal.SIGKILL, 30.0)):
        limit_s = time.monotonic() + seconds
        for pidfd in living:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        for pidfd in living:
            wait([pidfd], timeout=max(0.0, limit_s - time.monotonic()))


def _ended(rank: int, pid: int, folder: Path, *, killed: bool) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    fields = {"rank": rank, "at": time.monotonic(), "failed": True, "result": pickle.dumps({}),
              "output": (folder / f"{rank}.output").read_text(errors="replace")}
    result = folder / f"{rank}.result"
    if result.exists() and (killed or code >= 0):
        return fields | {"result": result.read_bytes(), "failed": code == 1}
    if killed:
        return fields | {"hung": True}
    return fields | ({"exit_code": code} if code >= 0 else {"signal": -code})


def _kill_all_children() -> None:
    """Also what the ranks started: it is an orphan now, and orphans become the server's."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in path.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            os.waitpid(pid, 0)


def _be_rank(request: dict[str, Any], rank: int, folder: Path, port: int) -> NoReturn:
    failed = True
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(folder / f"{rank}.output", "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(file=2)
        failed, result = _call(request, rank, folder, port)
        sys.stdout.flush()
        (folder / f"{rank}.part").write_bytes(result)
        (folder / f"{rank}.part").rename(folder / f"{rank}.result")
        # A failed rank leaves at once, so that its peers see its connections close.
        while not (failed or (folder / "failed").exists() or len(list(
                folder.glob("*.result"))) == request["world_size"]):
            time.sleep(0.003)
        import torch.distributed as dist
        if request["group"] and dist.is_initialized() and not failed:
            dist.destroy_process_group()
    finally:
        os._exit(int(failed))  # not an ordinary exit: this is a copy of the server


def _call(request: dict[str, Any], rank: int, folder: Path, port: int) -> tuple[bool, bytes]:
    """(whether it failed, pickled {"at": …, "value": …} or {"at": …, "error": …})."""
    world_size = request["world_size"]
    try:
        os.chdir(request["cwd"])
        os.environ |= request["environ"] | {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port)}
        os.environ |= {k: v.replace("{rank}", str(rank)) for k, v in request["env"].items()}
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
                "gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank,
                world_size=world_size, timeout=timedelta(seconds=request["timeout_s"] + 60))
        value = function(*args, **kwargs)
        return False, pickle.dumps({"at": time.monotonic(), "value": value})
    except BaseException as error:  # pytest's own outcomes are BaseExceptions
        words = f"in rank {rank} of {world_size}:\n{traceback.format_exc()}"
        try:
            error.add_note(words)
            packed = pickle.dumps({"at": time.monotonic(), "error": error})
            pickle.loads(packed)
        except Exception:  # an exception that doesn't survive pickling: its words do
            packed = pickle.dumps({"at": time.monotonic(), "error": RuntimeError(words)})
        return True, packed
