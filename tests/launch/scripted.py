"""The entry point of the launcher's ranks in these tests: scripted actions instead of training.

Arguments: a folder, and a JSON object that maps `ATTEMPT.RANK` to the action of that rank in that
attempt. Each rank appends notes to `notes.jsonl` in the folder, one write per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 200.0


def preload(argv: list[str]) -> int:
    """Imports no torch. The folder's name selects the outcome."""
    folder = Path(argv[0])
    if folder.name == "refused":
        print("no such data", file=sys.stderr)
        return 2
    if folder.name == "helped":
        print("usage")
        raise SystemExit(0)
    if folder.name == "endless":
        (folder / "notes.jsonl").write_text(f'{{"what": "loading", "pid": {os.getpid()}}}\n')
        while True:
            signal.pause()
    return 0


def main(argv: list[str]) -> int:
    rank = Rank(Path(argv[0]))
    signal.signal(
        signal.SIGTERM, lambda number, frame: rank.note("sigterm", received=rank.receive()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    rank.note("started", sid=os.getsid(0), server=os.getppid(), env=dict(os.environ), argv=argv)
    if os.environ["WORLD_SIZE"] != str(len(rank.wait("started"))):
        raise AssertionError("a rank is missing")
    action, _, value = json.loads(argv[1]).get(f"{rank.attempt}.{rank.rank}", "").partition("=")
    return int(getattr(rank, action or "complete")(value) or 0)


class Rank:
    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes.jsonl"
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.num_ranks = int(os.environ["WORLD_SIZE"])

    def note(self, what: str, **more: Any) -> None:
        line = {"what": what, "attempt": self.attempt, "rank": self.rank, "pid": os.getpid(),
                "time_s": time.monotonic(), **more}
        fd = os.open(self.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, (json.dumps(line) + "\n").encode())
        os.close(fd)

    def wait(self, what: str, num: int | None = None) -> list[dict[str, Any]]:
        """Wait for `num` notes `what` of this attempt (default: one per rank)."""
        def noted() -> list[dict[str, Any]]:
            return [note for note in read(self.notes)
                    if (note["what"], note["attempt"]) == (what, self.attempt)]

        return wait_for(noted, num or self.num_ranks)

    def receive(self) -> str:
        """The keywords that the launcher has sent so far."""
        channel = socket.socket(fileno=os.dup(int(os.environ["TRAINER_LAUNCHER_FD"])))
        with contextlib.suppress(BlockingIOError), channel:
            return channel.recv(4096, socket.MSG_DONTWAIT).decode()
        return ""

    def complete(self, _: str) -> None:
        print(f"rank {self.rank} is done")

    def exit(self, code: str) -> int:
        return int(code)

    def vanish(self, code: str) -> None:
        """Exit without notifying the launcher, like a library that calls `os._exit`."""
        os._exit(int(code))

    def stop_server(self, _: str) -> None:
        """Stop the fork server, which should report the exit of this rank, and exit."""
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(4)

    def linger(self, code: str) -> int:
        """Fail while a non-daemon thread runs forever."""
        threading.Thread(target=threading.Event().wait).start()
        return int(code)

    def fail(self, _: str) -> None:
        raise RuntimeError("as scripted")

    def die(self, number: str) -> None:
        """Die by a signal, with output that no newline has flushed, and with a living child."""
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.note("child")
            while True:
                signal.pause()
        self.wait("child", 1)
        print("the last line")
        sys.stderr.write("unfinished line")
        os.kill(os.getpid(), int(number))

    def follow(self, code: str) -> int:
        """Exit when a peer has exited, like a rank whose connection broke."""
        watch = select.poll()
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            for pid in (n["pid"] for n in self.wait("started") if n["rank"] != self.rank):
                watch.register(os.pidfd_open(pid), select.POLLIN)
            watch.poll()
        return int(code)

    def serve(self, num: str) -> int:
        """Run until a stop request, and exit once `num` ranks (default: all) have received one."""
        self.note("serving")
        self.wait("sigterm", int(num or 0))
        return 75

    def stubborn(self, _: str) -> None:
        self.note("serving")
        while True:
            signal.pause()

    def stopped(self, _: str) -> None:
        """Stop itself; a request that comes before that stays pending."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        self.note("serving")
        os.kill(os.getpid(), signal.SIGSTOP)

    def orphan(self, _: str) -> int:
        """Save and exit when the launcher has died."""
        self.note("serving")
        select.select([int(os.environ["TRAINER_LAUNCHER_FD"])], [], [])
        print("rank", self.rank, "saves", flush=True)
        self.note("saved")
        return 75

    def save(self, step: str) -> None:
        """Report the run folder, save a step there, and fail 2 steps later."""
        os.write(int(os.environ["TRAINER_LAUNCHER_FD"]), f'run "{self.folder}"\n'.encode())
        with (self.folder / "events.jsonl").open("a") as events:
            events.write(json.dumps({"event": "save", "at_step": int(step)}) + "\n")
        with (self.folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": int(step) + 2}) + "\n")
        os._exit(1)


def read(path: Path) -> list[dict[str, Any]]:
    # Without a line that is being written: a reader may see a part of a write.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for(get: Callable[[], list[Any]], num: int = 1) -> list[Any]:
    """Wait until the list that `get` returns has `num` items, and return it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while len(items := get()) < num:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(items)} of {num}: {items}")
        time.sleep(0.005)
    return items
