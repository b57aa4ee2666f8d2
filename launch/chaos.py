"""`python -m launch.chaos RUN --mtbf S`: a drill that strikes the ranks of a running job at random.

It strikes at the times of a Poisson process, on this host only; where a run has several hosts, give
the command on each. A process is struck if an event of the run's newest attempt names its pid on
this host and it has the run's `events.jsonl` open for writing, as no process outside the run has.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.options import Parser
from launch.progress import Progress
from trainer import processes
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, ConfigError
from trainer.log import read_events

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM,
         "node": signal.SIGKILL}  # fmt: skip
EVENTS = "events.jsonl"  # `trainer.folder` has the name too, and imports torch
POLL_S = 0.05
"""How often the run is looked at while a strike is due and there is nothing to strike."""

LOOK_S = 1.0
"""How often it is looked at otherwise."""

SETTLE_S = 5.0
"""How long a signal may take to show, so that no process is struck twice for one strike."""

DESCRIPTION = """\
Strike the ranks that a run has on this host, at random times, until the run ends or Ctrl-C. Each
strike is printed. The same bits come out as without it: python -m trainer compare."""

EPILOG = """\
kinds: kill  SIGKILL to a rank: the launcher restarts
       stop  SIGSTOP to a rank, as if it hung: likewise, once the others have noticed
       term  SIGTERM to a rank: all save and stop, and it takes a new start to go on
       node  SIGKILL to the launcher and all ranks of this host: it takes a new start"""


def main(argv: Sequence[str]) -> int:
    """Strike until the run has ended; the exit code is 0 then, or 2 for bad arguments."""
    try:
        options = _parse(argv)
    except ConfigError as error:
        print(f"launch.chaos: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    with contextlib.suppress(KeyboardInterrupt):
        _drill(options, random.Random(options.seed))
    return EXIT_COMPLETE


def ranks_here(run: Path) -> dict[int, int]:
    """Rank → pid of the living processes on this host of the run's newest attempt."""
    starts = [e for e in read_events(run / EVENTS) if e.get("event") == "start"]
    newest = max((e["attempt"] for e in starts), default=None)
    told = {e["rank"]: e["pid"] for e in starts
            if e["attempt"] == newest and e["node"] == socket.gethostname() and "pid" in e}
    return {rank: pid for rank, pid in sorted(told.items())
            if processes.state(pid) not in "ZX" and _writes(pid, run / EVENTS)}


def launcher_of(pid: int) -> list[int]:
    """The launcher of a rank, and its fork server where there is one; [] if it has none."""
    parent = processes.parent(pid)
    hot = processes.name(parent) == "fork server"
    found = [processes.parent(parent), parent] if hot else [parent]
    return found if _is_launcher(found[0]) else []


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m launch.chaos", description=DESCRIPTION, epilog=EPILOG,
                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--mtbf", type=float, required=True, metavar="S",
                        help="mean time between strikes on this host, in seconds")
    parser.add_argument("--kinds", default="kill,stop", metavar="K,K",
                        help=f"of {', '.join(KINDS)} (default: kill,stop)")
    parser.add_argument("--seed", type=int, metavar="N",
                        help="the same draws of times, kinds and ranks each time")
    parser.add_argument("--count", type=int, metavar="N", help="end after N strikes")
    parser.add_argument("--wait-s", type=float, default=60.0, metavar="S",
                        help="how long there may be no rank before the run counts as ended, "
                        "in seconds (default: 60)")
    options = parser.parse_args(argv)
    options.kinds = options.kinds.split(",")
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        raise ConfigError(f"--kinds has {unknown[0]!r}; use some of {','.join(KINDS)}")
    if not 0 < options.mtbf < float("inf"):
        raise ConfigError(f"--mtbf is {options.mtbf:g}; use a number of seconds above 0")
    if options.count is not None and options.count < 1:
        raise ConfigError(f"--count is {options.count}; use 1 or more, or leave it out")
    if not options.wait_s >= 0:
        raise ConfigError(f"--wait-s is {options.wait_s:g}; use a number of seconds, 0 or more")
    if not os.path.isdir("/proc/self/fd"):
        raise ConfigError("this looks for processes in /proc, so it needs Linux")
    return options


def _drill(options: argparse.Namespace, draw: random.Random) -> None:
    began_s = seen_s = time.monotonic()
    after_s, kind = draw.expovariate(1 / options.mtbf), draw.choice(options.kinds)
    due_s, strikes = float("inf"), 0  # the time of the first runs from when there is a rank
    while strikes != options.count:
        now_s = time.monotonic()
        ranks = ranks_here(options.run)
        if ranks:
            seen_s, due_s = now_s, min(due_s, now_s + after_s)
        elif _is_complete(options.run):
            return _say(began_s, f"the run is complete after {strikes} strikes")
        elif now_s - seen_s > options.wait_s:
            return _say(began_s, f"no rank on this host for {options.wait_s:g} s, after {strikes} "
                        "strikes: the run has ended")
        if now_s < due_s:
            time.sleep(min(due_s - now_s, LOOK_S))
        elif targets := _targets(kind, ranks):
            _strike(kind, targets, options.run, draw, began_s)
            strikes += 1
            after_s, kind = draw.expovariate(1 / options.mtbf), draw.choice(options.kinds)
            due_s = now_s + after_s
        else:
            time.sleep(POLL_S)  # between two attempts


def _targets(kind: str, ranks: dict[int, int]) -> dict[int, int]:
    """Those that may be struck now. One rank is stopped at a time: the others have to notice it."""
    if KINDS[kind] == signal.SIGKILL:
        return ranks
    stopped = {rank for rank, pid in ranks.items() if processes.state(pid) == "T"}
    if kind == "stop" and stopped:
        return {}
    return {rank: pid for rank, pid in ranks.items() if rank not in stopped}


def _strike(kind: str, ranks: dict[int, int], run: Path, draw: random.Random,
            began_s: float) -> None:  # fmt: skip
    number, extra = KINDS[kind], []
    if kind == "node":
        # The launcher first: nothing is left that could save, as when a host loses its power.
        extra = launcher_of(next(iter(ranks.values())))
    else:
        rank = draw.choice(sorted(ranks))
        ranks = {rank: ranks[rank]}
    for pid in extra:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if _writes(pid, run / EVENTS):  # with the descriptor in hand: the pid is still its own
                signal.pidfd_send_signal(pidfd, number)
            os.close(pidfd)
    deadline_s = time.monotonic() + SETTLE_S
    while not all(_shows(number, pid) for pid in ranks.values()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 10)
    progress = Progress()
    progress.update(str(run))
    who = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in ranks.items())
    if kind == "node":
        who += " and the launcher ({})".format(f"pid {extra[0]}" if extra else "there is none")
    _say(began_s, f"{kind}: {number.name} to {who} at step {progress.reached}")


def _shows(number: signal.Signals, pid: int) -> bool:
    """Whether a signal has had its effect; SIGTERM takes as long as the rank takes to save."""
    return number == signal.SIGTERM or processes.state(pid) in "ZX" or (
        number == signal.SIGSTOP and processes.state(pid) == "T")


def _say(began_s: float, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} +{time.monotonic() - began_s:.1f} s  {text}", flush=True)


def _is_complete(run: Path) -> bool:
    """Whether the newest attempt has come to the run's end. (An older one may have had fewer
    steps to make.)"""
    events = read_events(run / EVENTS)
    newest = max((e["attempt"] for e in events), default=None)
    return any(e["event"] == "end" and e["attempt"] == newest for e in events)


def _writes(pid: int, path: Path) -> bool:
    """Whether a process has the file open for appending. (`tail -f` reads it.)"""
    try:
        wanted = path.stat()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket
                if os.path.samestat(wanted, entry.stat()):
                    info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                    flags = int(info.partition("flags:")[2].split()[0], 8)
                    if flags & os.O_APPEND:
                        return True
    except OSError:  # it has ended, or is another user's
        pass
    return False


def _is_launcher(pid: int) -> bool:
    """By its command line: what python was given to run, not what that was given. The parent of an
    orphan is init, or whoever adopts in its place."""
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    for before, word, after in zip(words, words[1:], words[2:], strict=False):
        if re.fullmatch("-[a-zA-Z]*m", word):
            return after in ("launch", "torch.distributed.run")
        if not word.startswith("-") and before not in ("-W", "-X"):
            return Path(word).name == "torchrun"
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
