"""How long from SIGKILL of a rank to the next new step?

    python -m benchmarks.recovery [--repeats 20] [--torchrun-repeats 5] [--lightning-repeats 5]

The state is saved at every tenth step. Two steps later, when that save is durable and one step old,
a rank is killed: the first and the last in turn. The launchers take turns. The phases are those of
rank 0 in events.jsonl. Lightning is killed from outside, and its rank 0 reports its own phases.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import lightning_peer, reporting
from trainer.storage.jsonl import newest_step, read_records
from trainer.storage.layout import EVENTS, METRICS
from trainer.telemetry.events import read_events

RANKS, EVERY = 2, 10
SETTLE_S = 1.0
"""A rank stands still for this time before it is killed, so that the save before has ended."""
POLL_S = 0.005
DEADLINE_S = 120.0
"""For a launch to begin, and for each recovery."""

WHOLE = "kill → next new step"
PHASES = {
    WHOLE: ("kill", "new-step"),
    "detect": ("kill", "stop"), "stop": ("stop", "rendezvous"),
    "rendezvous": ("rendezvous", "fork"), "fork": ("fork", "start"),
    "all of these, and new processes": ("kill", "start"),
    "start": ("start", "join"), "process group": ("join", "build"), "build": ("build", "warm-up"),
    "warm-up": ("warm-up", "restore"), "restore": ("restore", "train"),
    "imports, group, build, restore": ("start", "train"),
    "first batch and step": ("train", "first-step"), "next step": ("first-step", "new-step"),
}  # fmt: skip
"""Phase → what it begins and ends with. torchrun, and Lightning under it, tell fewer of these."""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For Lightning: otherwise torchrun's agent keeps one store for all attempts, where the ranks of
the second find the addresses of the first ("Gloo connectFullMesh … Connection refused")."""


def measure(launcher: str, repeats: range, folder: Path) -> list[dict[str, Any]]:
    """Kill a rank at each of `repeats` in one run; the times of everything, for each death."""
    folder.mkdir(exist_ok=True)
    deaths = [(EVERY * (place + 1) + 2, number % 2 * (RANKS - 1))  # (step, rank)
              for place, number in enumerate(repeats)]
    watch = measure_lightning if launcher == "lightning" else measure_trainer
    return watch(launcher, deaths, folder)


def measure_trainer(launcher: str, deaths: list[Any], folder: Path) -> list[dict[str, Any]]:
    """Each rank kills itself, by injected faults."""
    run = folder / launcher
    faults = [f"--inject={kind}:rank={rank}:step={step}" for step, rank in deaths
              for kind in (f"slow:seconds={SETTLE_S}", "kill")]
    arguments = ["sample", "--run-dir", str(run), f"--steps={deaths[-1][0] + 1}",
                 "--eval.every=off", f"--checkpoint.every={EVERY}", *faults]
    with running(launcher, arguments, folder) as process:
        # Lines have no time stamp.
        made = [wait_for(process, f"step {step}", lambda step=step: time.time() if newest_step(
            run / METRICS) >= step else None) for step, _ in deaths]
        process.wait(DEADLINE_S)
    events = read_events(run / EVENTS)
    kills = [e["time"] for e in events if e["event"] == "fault" and e["fault"].startswith("kill")]
    firsts = [e for e in events if e["event"] == "first-step" and e["rank"] == 0][1:]
    if not len(kills) == len(firsts) == len(deaths):
        raise SystemExit(f"{len(kills)} kills and {len(firsts)} restarts instead of {len(deaths)}\n"
                         + output_of(folder / f"{launcher}.txt"))
    return [
        {"kill": kill, **first["entered"], "first-step": first["time"], "new-step": new,
         "cpu_s": first["cpu_s"], "lost": death - first["step"], "redone": death - first["step"]}
        for kill, first, new, (death, _) in zip(kills, firsts, made, deaths, strict=True)
    ]  # fmt: skip


def measure_lightning(launcher: str, deaths: list[Any], folder: Path) -> list[dict[str, Any]]:
    """The rank stands still in the step of its death and reports it; then it is killed."""
    run = folder / launcher
    arguments = ["train", str(run), f"--steps={deaths[-1][0] + 1}", f"--every={EVERY}",
                 f"--deaths={json.dumps(deaths)}"]
    kills: list[float] = []
    with running(launcher, arguments, folder) as process:
        def line(**wanted: Any) -> dict[str, Any]:
            return wait_for(process, f"a line with {wanted}", lambda: next(
                (line for line in read_records(run / lightning_peer.STEPS)
                 if wanted.items() <= line.items()), None))

        for step, rank in deaths:
            victim = line(event="stand", step=step, rank=rank)
            time.sleep(SETTLE_S)
            kills.append(time.time())
            os.kill(victim["pid"], signal.SIGKILL)
            line(event="step", step=step, rank=0)
        process.wait(DEADLINE_S)
    found = []
    for kill, (death, _) in zip(kills, deaths, strict=True):
        after = [line for line in read_records(run / lightning_peer.STEPS)
                 if line["rank"] == 0 and line["time"] > kill]
        new = next(place for place, line in enumerate(after)
                   if line["event"] == "step" and line["step"] == death)
        starts, trains, steps = ([line for line in after[: new + 1] if line["event"] == name]
                                 for name in ("start", "train", "step"))
        found.append({
            "kill": kill, "start": starts[-1]["time"], "train": trains[-1]["time"],
            "first-step": steps[0]["time"], "new-step": steps[-1]["time"],
            "cpu_s": steps[0]["cpu_s"], "lost": death - 1 - trains[-1]["step"],
            "redone": len(steps) - 1,
        })  # fmt: skip
    return found


@contextlib.contextmanager
def running(launcher: str, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    """The launch; its output is shown if a step does not come."""
    command = (["launch", f"--nproc-per-node={RANKS}", "--max-restarts=3", "--"]
               if launcher == "launch" else
               ["torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}",
                "--max-restarts=1000", "-m",
                "benchmarks.lightning_peer" if launcher == "lightning" else "trainer"])
    environment = reporting.environment(**(FRESH_STORE if launcher == "lightning" else {}))
    shown = folder / f"{launcher}.txt"
    with shown.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", *command, *arguments], stdout=output,
                                   stderr=output, process_group=0, env=environment)
        try:
            yield process
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{output_of(shown)}") from error
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for(process: subprocess.Popen, what: str, look: Callable[[], Any]) -> Any:
    """The first result of `look` that is not None.

    Raises:
        TimeoutError: the process ended without it, or the deadline passed.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        ended = process.poll() is not None
        if (found := look()) is not None:
            return found
        if ended:
            break
        time.sleep(POLL_S)
    raise TimeoutError(f"{what} was not seen")


def output_of(path: Path) -> str:
    """The last lines of a launch's output."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:])


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread of each recorded phase, in seconds."""
    return {"seconds": {name: reporting.summary([death[end] - death[begin] for death in found])
                        for name, (begin, end) in PHASES.items()
                        if {begin, end} <= found[0].keys()},
            **{name: reporting.summary([death[name] for death in found])
               for name in ("cpu_s", "lost", "redone")}}


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = [[name, *(reporting.spread(side["seconds"][name], 1e3, 0)
                     if name in side["seconds"] else "" for side in found.values())]
            for name in PHASES]
    rows.append(["processor time of rank 0",
                 *(reporting.spread(side["cpu_s"], 1e3, 0) for side in found.values())])
    rows += [[f"steps {what}", *(f"{side[what]['median']:.0f}" for side in found.values())]
             for what in ("lost", "redone")]
    rows.append(["n", *(str(side["cpu_s"]["n"]) for side in found.values())])
    return reporting.table(["ms, median (quartiles)", *found], rows)


def main() -> None:
    parser = reporting.parser("recovery", __doc__)
    launchers = {"launch": ("", 20), "torchrun": ("torchrun-", 5), "lightning": ("lightning-", 5)}
    for launcher, (option, repeats) in launchers.items():
        parser.add_argument(f"--{option}repeats", type=int, default=repeats, dest=launcher,
                            help=f"deaths under {launcher}, 0: leave it out (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3,
                        help="runs of each launcher, in turn, that share the deaths (%(default)s)")
    options = parser.parse_args()
    chosen = reporting.installed([name for name in launchers if getattr(options, name)])
    machine = reporting.machine()
    deaths: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for launcher in chosen:
                first, end = (getattr(options, launcher) * n // options.rounds
                              for n in (number, number + 1))
                if first < end:
                    deaths[launcher] += measure(launcher, range(first, end),
                                                Path(folder, f"round-{number}"))
    found = {name: summarise(times) for name, times in deaths.items()}
    print(show(found))
    whole = {name: side["seconds"][WHOLE]["median"] for name, side in found.items()}
    ratios = {name: median / whole["launch"] for name, median in whole.items() if "launch" in whole}
    print(f"{WHOLE}: " + ", ".join(f"{name} 1/{ratio:.1f}" for name, ratio in ratios.items()))
    reporting.print_json("recovery", machine=machine, launchers=found, ratios=ratios,
                         load_average_after=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    reporting.finish(main)
