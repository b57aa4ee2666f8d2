"""`python -m launch.chaos RUN --mtbf S`: kill or stop ranks of a running job at random times (a
Poisson process). A target is named by an event of the run's newest attempt, and has the run's
`events.jsonl` open for appending, which no process outside the run does."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.options import Parser, number
from launch.progress import read_progress
from trainer.errors import EXIT_COMPLETE, EXIT_CONFIG, ConfigError
from trainer.resilience.launcher_channel import TORCH_AGENTS
from trainer.storage import processes
from trainer.storage.layout import EVENTS
from trainer.telemetry.events import read_events

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM,
         "node": signal.SIGKILL}
POLL_S, CHECK_S = 0.05, 1.0  # interval of checks while a due fault has no target, and otherwise

DESCRIPTION = """\
Kill or stop ranks of a run on this host, at random times, until the run ends or Ctrl-C. Each fault
is printed. The run ends with the same bits as without faults (python -m trainer compare)."""

EPILOG = """\
kinds: kill  SIGKILL to a rank: the launcher restarts the ranks
       stop  SIGSTOP to a rank, as if it hung: restarted once the other ranks have noticed
       term  SIGTERM to a rank: all ranks save and stop; start the run again to continue
       node  SIGKILL to the launcher and all ranks on this host: start the run again to continue"""


def main(argv: Sequence[str]) -> int:
    """Inject faults until the run has ended. Returns 0, or 2 for bad arguments."""
    try:
        options = _parse(argv)
    except ConfigError as error:
        print(f"launch.chaos: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    with contextlib.suppress(KeyboardInterrupt):
        _drill(options, random.Random(options.seed))
    return EXIT_COMPLETE


def local_ranks(run: Path) -> dict[int, int]:
    """Pids, by rank, of the living processes of the run's newest attempt on this host."""
    starts = [e for e in read_events(run / EVENTS) if e.get("event") == "start"]
    newest = max((e["attempt"] for e in starts), default=None)
    pids = {e["rank"]: e["pid"] for e in starts
            if e["attempt"] == newest and e["node"] == socket.gethostname() and "pid" in e}
    return {rank: pid for rank, pid in sorted(pids.items())
            if processes.is_alive(pid) and _writes(pid, run / EVENTS)}


def launcher_of(pid: int) -> list[int]:
    """Pids of a rank's launcher and of its fork server, if any; [] for an orphan."""
    parent = processes.parent(pid)
    hot = processes.name(parent) == "fork server"
    found = [processes.parent(parent), parent] if hot else [parent]
    return found if processes.program(found[0]) in ("launch", *TORCH_AGENTS) else []


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m launch.chaos", description=DESCRIPTION, epilog=EPILOG,
                    allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--mtbf", type=number(float, 0.001), required=True, metavar="S",
                        help="mean time between faults on this host, in seconds")
    parser.add_argument("--kinds", type=_kinds, default=["kill", "stop"], metavar="K,K",
                        help=f"comma-separated kinds, of {', '.join(KINDS)} (default: kill,stop)")
    parser.add_argument("--seed", type=int, metavar="N",
                        help="seed of the times, kinds and ranks")
    parser.add_argument("--count", type=number(int, 1), metavar="N", help="end after N faults")
    parser.add_argument("--wait-s", type=number(float, 0), default=60.0, metavar="S",
                        help="seconds without a rank on this host after which the run counts "
                        "as ended (default: 60)")
    return parser.parse_args(argv)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(KINDS)}")
    return kinds


def _drill(options: argparse.Namespace, draw: random.Random) -> None:
    began_s = seen_s = time.monotonic()
    after_s, kind = draw.expovariate(1 / options.mtbf), draw.choice(options.kinds)
    due_s, faults = float("inf"), 0  # the first delay starts when there is a rank
    while faults != options.count:
        now_s = time.monotonic()
        ranks = local_ranks(options.run)
        if ranks:
            seen_s, due_s = now_s, min(due_s, now_s + after_s)
        elif _is_complete(options.run):
            return _print_line(began_s, f"the run is complete after {faults} faults")
        elif now_s - seen_s > options.wait_s:
            return _print_line(began_s, f"no rank on this host for {options.wait_s:g} s, after "
                               f"{faults} faults: the run has ended")
        if now_s < due_s:
            time.sleep(min(due_s - now_s, CHECK_S))
        elif targets := _targets(kind, ranks):
            _inject(kind, targets, options.run, draw, began_s)
            faults += 1
            after_s, kind = draw.expovariate(1 / options.mtbf), draw.choice(options.kinds)
            due_s = now_s + after_s
        else:
            time.sleep(POLL_S)  # between two attempts


def _targets(kind: str, ranks: dict[int, int]) -> dict[int, int]:
    """Ranks that may be targets now. Only one is stopped at a time: the others must notice it."""
    if KINDS[kind] == signal.SIGKILL:
        return ranks
    running = {rank: pid for rank, pid in ranks.items() if not processes.is_stopped(pid)}
    return {} if kind == "stop" and running != ranks else running


def _inject(
    kind: str, ranks: dict[int, int], run: Path, draw: random.Random, began_s: float
) -> None:
    number, who = KINDS[kind], ""
    if kind == "node":
        # The launcher first: as in a power failure, no process is left that could save.
        launcher = launcher_of(next(iter(ranks.values())))
        who = f" and the launcher ({f'pid {launcher[0]}' if launcher else 'none'})"
        for pid in launcher:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    else:
        rank = draw.choice(sorted(ranks))
        ranks = {rank: ranks[rank]}
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if _writes(pid, run / EVENTS):  # checked with the pidfd open: not a reused pid
                signal.pidfd_send_signal(pidfd, number)
            os.close(pidfd)
    step = read_progress(run).reached_step
    who = ", ".join(f"rank {rank} (pid {pid})" for rank, pid in ranks.items()) + who
    _print_line(began_s, f"{kind}: {number.name} to {who} at step {step}")


def _print_line(began_s: float, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} +{time.monotonic() - began_s:.1f} s  {text}", flush=True)


def _is_complete(run: Path) -> bool:
    """Whether the newest attempt has finished the run; an older one may have had fewer steps."""
    events = read_events(run / EVENTS)
    newest = max((e["attempt"] for e in events), default=None)
    return any(e["event"] == "end" and e["attempt"] == newest for e in events)


def _writes(pid: int, path: Path) -> bool:
    """Whether a process has the file open for appending (`tail -f` only reads it)."""
    with contextlib.suppress(OSError):  # it has exited, or belongs to another user
        wanted = path.stat()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, or a socket
                if os.path.samestat(wanted, entry.stat()):
                    info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                    if int(info.partition("flags:")[2].split()[0], 8) & os.O_APPEND:
                        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
