"""How long a run stands still when a rank dies: from the SIGKILL to the next new step.

    python -m benchmarks.recovery [--repeats 20] [--torchrun-repeats 5] [--lightning-repeats 5]
                                  [--rounds 3] [--json]

The small CNN on the bundled sample trains on two ranks. At every tenth step the state is saved. Two
steps later, with that save safe on the disk and one step old, a rank is killed: the first and the
last in turn. Under `python -m launch`; for comparison under plain torchrun; and under torchrun with
Lightning, which resumes from its last checkpoint. They take turns, in `--rounds` runs each. The
phases are those that events.jsonl tells of rank 0; `stop` includes the survivor's save, if it makes
one. Lightning is killed from outside, and its rank 0 tells of itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import lightning_peer, reporting
from trainer.storage.layout import EVENTS, METRICS
from trainer.telemetry.events import read_events
from trainer.telemetry.metrics import read_metrics

EVERY = 10
SETTLE_S = 1.0
"""For how long a rank stands still before it is killed, so that the save before has ended."""

POLL_S = 0.005
DEADLINE_S = 120.0
"""For a launch to begin, and for each recovery."""

PHASES = {
    "detect": ("kill", "stop"), "stop": ("stop", "rendezvous"),
    "rendezvous": ("rendezvous", "fork"), "fork": ("fork", "start"), "start": ("start", "join"),
    "process group": ("join", "build"), "build": ("build", "warm-up"),
    "warm-up": ("warm-up", "restore"), "restore": ("restore", "train"),
    "first batch and step": ("train", "first-step"), "next step": ("first-step", "new-step"),
}  # fmt: skip
"""Phase → what it begins and ends with."""

WHOLE = "kill → next new step"
COLD_PHASES = {"new processes": ("kill", "start")}
"""What plain torchrun spends instead of the phases before `start`."""

LIGHTNING_PHASES = {"imports, group, build, restore": ("start", "train")}
"""What Lightning spends instead of the phases from `start` to `first batch and step`."""

LAUNCHERS = {
    "launch": PHASES,
    "torchrun": {**COLD_PHASES, **dict(list(PHASES.items())[list(PHASES).index("start"):])},
    "lightning": {**COLD_PHASES, **LIGHTNING_PHASES, **dict(list(PHASES.items())[-2:])},
}  # fmt: skip
"""Launcher → its phases. `lightning` is torchrun with another trainer."""

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun's agent otherwise keeps one store for all attempts, where the ranks of the second find
the addresses of the first ("Gloo connectFullMesh … Connection refused"). Lightning has no handshake
that would tell them apart, and needs further attempts or never gets through."""


def command(launcher: str, ranks: int) -> list[str]:
    """The launcher's part of the command line."""
    if launcher == "launch":
        return [sys.executable, "-m", "launch", f"--nproc-per-node={ranks}", "--max-restarts=3",
                "--"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc_per_node={ranks}", "--max-restarts=1000", "-m",
            "benchmarks.lightning_peer" if launcher == "lightning" else "trainer"]


def measure(
    launcher: str, ranks: int, repeats: range, folder: Path
) -> list[dict[str, Any]]:
    """Kill a rank at each of `repeats` in one run; when everything happened, for each death."""
    folder.mkdir(exist_ok=True)
    deaths = [(EVERY * (place + 1) + 2, number % 2 * (ranks - 1))
              for place, number in enumerate(repeats)]
    watch = _measure_lightning if launcher == "lightning" else _measure_trainer
    return watch(launcher, ranks, deaths, folder)


def _measure_trainer(
    launcher: str, ranks: int, deaths: list[tuple[int, int]], folder: Path
) -> list[dict[str, Any]]:
    """Each rank kills itself, at the injected faults."""
    run = folder / launcher
    faults = [f"--inject={kind}:rank={rank}:step={step}" for step, rank in deaths
              for kind in (f"slow:seconds={SETTLE_S}", "kill")]
    arguments = ["sample", "--run-dir", str(run), f"--steps={deaths[-1][0] + 1}",
                 "--eval.every=off",
                 f"--checkpoint.every={EVERY}", *faults]
    with _running(launcher, ranks, arguments, folder) as process:
        # Lines are seen when they appear: a step has no other time stamp.
        made = [wait_for_step(run / METRICS, step, process) for step, _ in deaths]
        process.wait(DEADLINE_S)
    events = read_events(run / EVENTS)
    kills = [e["time"] for e in events if e["event"] == "fault" and e["fault"].startswith("kill")]
    firsts = [e for e in events if e["event"] == "first-step" and e["rank"] == 0][1:]
    if not len(kills) == len(firsts) == len(deaths):
        raise SystemExit(f"{len(kills)} kills and {len(firsts)} restarts instead of {len(deaths)}\n"
                         + output_of(folder / f"{launcher}.txt"))
    return [
        {"kill": kill, **first["entered"], "first-step": first["time"], "new-step": new,
         "cpu_s": first["cpu_s"], "lost": death - first["step"], "redone": death - first["step"],
         "starts": 1}
        for kill, first, new, (death, _) in zip(kills, firsts, made, deaths, strict=True)
    ]  # fmt: skip


def _measure_lightning(
    launcher: str, ranks: int, deaths: list[tuple[int, int]], folder: Path
) -> list[dict[str, Any]]:
    """The rank stands still in the step of its death and says so; then it is killed."""
    run = folder / launcher
    arguments = [str(run), f"--steps={deaths[-1][0] + 1}", f"--every={EVERY}",
                 f"--deaths={lightning_peer.show_deaths(deaths)}"]
    kills: list[float] = []
    with _running(launcher, ranks, arguments, folder) as process:
        for step, rank in deaths:
            victim = wait_for_line(run, process, event="stand", step=step, rank=rank)
            time.sleep(SETTLE_S)
            kills.append(time.time())
            os.kill(victim["pid"], signal.SIGKILL)
            wait_for_line(run, process, event="step", step=step, rank=0)
        process.wait(DEADLINE_S)
    found = []
    for kill, (death, _) in zip(kills, deaths, strict=True):
        after = [line for line in lightning_peer.lines_of(run)
                 if line["rank"] == 0 and line["time"] > kill]
        new = next(place for place, line in enumerate(after)
                   if line["event"] == "step" and line["step"] == death)
        starts, trains, steps = ([line for line in after[: new + 1] if line["event"] == name]
                                 for name in ("start", "train", "step"))
        found.append({
            "kill": kill, "start": starts[-1]["time"], "train": trains[-1]["time"],
            "first-step": steps[0]["time"], "new-step": steps[-1]["time"], "starts": len(starts),
            "cpu_s": steps[0]["cpu_s"], "lost": death - 1 - trains[-1]["step"],
            "redone": len(steps) - 1,
        })  # fmt: skip
    return found


@contextlib.contextmanager
def _running(
    launcher: str, ranks: int, arguments: list[str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The launch; its output is shown where a step fails to come."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    shown = folder / f"{launcher}.txt"
    with shown.open("wb") as output:
        process = subprocess.Popen(
            [*command(launcher, ranks), *arguments], stdout=output, stderr=output,
            process_group=0, env={**os.environ, "PYTHONPATH": path,
                                  **(FRESH_STORE if launcher == "lightning" else {})},
        )  # fmt: skip
        try:
            yield process
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{output_of(shown)}") from error
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for_step(path: Path, step: int, process: subprocess.Popen[bytes]) -> float:
    """When the line of a step was there, in seconds since the epoch."""
    deadline, size = time.monotonic() + DEADLINE_S, -1
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            size, now = found, time.time()
            if any(line["step"] == step for line in read_metrics(path)):
                return now
        if ended:
            break
        time.sleep(POLL_S)
    raise TimeoutError(f"step {step} was not made")


def wait_for_line(run: Path, process: subprocess.Popen[bytes], **wanted: Any) -> dict[str, Any]:
    """The first line of Lightning's that has these values, once it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        for line in lightning_peer.lines_of(run):
            if wanted.items() <= line.items():
                return line
        if ended:
            break
        time.sleep(POLL_S)
    raise TimeoutError(f"no line with {wanted}")


def output_of(path: Path) -> str:
    """The last lines that a launch has shown."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-40:])


def summarise(found: list[dict[str, Any]], phases: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Medians and spread of each phase and of the whole, in seconds."""
    spans = {WHOLE: ("kill", "new-step"), **phases}
    return {
        "seconds": {name: reporting.summary([death[end] - death[begin] for death in found])
                    for name, (begin, end) in spans.items()},
        "rank_0_cpu_s": reporting.summary([death["cpu_s"] for death in found]),
        "starts": reporting.summary([death["starts"] for death in found]),
        "steps_lost": reporting.summary([death["lost"] for death in found]),
        "steps_redone": reporting.summary([death["redone"] for death in found]),
    }  # fmt: skip


def show(found: dict[str, dict[str, Any]]) -> str:
    rows = []
    places = list(PHASES)
    first = places.index("first batch and step")
    for name in (WHOLE, *COLD_PHASES, *places[:first], *LIGHTNING_PHASES, *places[first:]):
        row = [name]
        for side in found.values():
            values = side["seconds"].get(name)
            row.append("" if values is None else reporting.spread(values, 1e3, 0))
        rows.append(row)
    rows.append(["processor time of rank 0",
                 *(reporting.spread(side["rank_0_cpu_s"], 1e3, 0) for side in found.values())])
    for what in ("lost", "redone"):
        rows.append([f"steps {what}",
                     *(f"{side[f'steps_{what}']['median']:.0f}" for side in found.values())])
    rows.append(["n", *(str(side["rank_0_cpu_s"]["n"]) for side in found.values())])
    head = ["ms, median (quartiles)", *found]
    return reporting.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launchers", default=",".join(LAUNCHERS),
                        help="which of them (%(default)s)")
    for launcher, option, repeats in (("launch", "", 20), ("torchrun", "torchrun-", 5),
                                      ("lightning", "lightning-", 5)):
        parser.add_argument(f"--{option}repeats", type=int, default=repeats, dest=launcher,
                            help=f"deaths under {launcher}, 0: leave it out (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3,
                        help="runs of each launcher, in turn, that share the deaths (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    chosen = options.launchers.split(",")
    if unknown := set(chosen) - set(LAUNCHERS):
        parser.error(f"--launchers: {', '.join(unknown)}; use some of {', '.join(LAUNCHERS)}.")
    if "lightning" in chosen and importlib.util.find_spec("pytorch_lightning") is None:
        print("lightning is left out: pytorch-lightning isn't installed (pip install -e .[bench])",
              file=sys.stderr)
        chosen.remove("lightning")
    chosen = [name for name in chosen if getattr(options, name)]
    machine = reporting.machine()
    deaths: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for launcher in chosen:
                total = getattr(options, launcher)
                repeats = range(total * number // options.rounds,
                                total * (number + 1) // options.rounds)
                if repeats:
                    deaths[launcher] += measure(launcher, options.ranks, repeats,
                                                Path(name, f"round-{number}"))
    found = {name: summarise(seen, LAUNCHERS[name]) for name, seen in deaths.items()}
    medians = {name: side["seconds"][WHOLE]["median"] for name, side in found.items()}
    ratios = {f"launch/{name}": medians["launch"] / median for name, median in medians.items()
              if name != "launch" and "launch" in medians}
    if not options.json:
        print(reporting.describe(machine) + f"; {options.ranks} ranks\n")
        print(show(found) + "\n")
        for name, ratio in ratios.items():
            print(f"{name}: {ratio:.3f} = 1/{1 / ratio:.1f}")
    reporting.print_json("recovery", machine=machine, ranks=options.ranks, launchers=found,
                         ratios=ratios, load_average_after=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    reporting.finish(main)
