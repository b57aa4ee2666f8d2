"""What a save costs: how long the training is held, and when the state is safe on the disk.

    python -m benchmarks.checkpoint [--sizes 10,100,1000] [--parts stall,overhead,share] [--json]

stall     for how long the training thread is held, and when the state is durable: this trainer's
          save (held: in the save, and before the next update, until the copy of what an update
          changes is complete), the same without that overlap, torch.save without and with fsync,
          torch.distributed.checkpoint's save and async_save; beside them, as a yardstick, a copy of
          the same tensors into memory that is in use already, by as many threads.
overhead  the price of a durable save every 10 steps, as paired blocks of steps with and without.
share     one process that writes the whole state against two that write half of it each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import reporting
from benchmarks.saving import contestants
from benchmarks.synthetic_state import make_checkpointer, make_subject

BLOCK = 10
"""Steps from save to save, where their price is measured."""
PARTS = ("stall", "overhead", "share")


def measure_stall(megabytes: float, repeats: int, folder: Path) -> dict[str, Any]:
    """All contestants in turn, `repeats` times after a first round that doesn't count."""
    import torch

    subject = make_subject(megabytes)
    entrants, (alone, beside), close = contestants(subject, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp's, about a world of one
        for turn in range(repeats + 1):
            for contestant in entrants:
                path = folder / "other"
                path.mkdir()
                held, durable = contestant.run(path)
                shutil.rmtree(path)
                if not turn:
                    contestant.first = held
                    continue
                contestant.stalls.append(held)
                if durable is not None:
                    contestant.durables.append(durable)
    close()
    found = {c.name: {"stall": reporting.summary(c.stalls), "first_stall": c.first,
                      "durable": reporting.summary(c.durables) if c.durables else None}
             for c in entrants}
    stall = {name: values["stall"]["median"] for name, values in found.items()}
    return {
        "bytes": subject.bytes, "tensors": len(subject.live), "threads": torch.get_num_threads(),
        "contestants": found,
        "forward_backward": {"alone": reporting.summary(alone[1:]),
                             "beside_a_save": reporting.summary(beside[1:])},
        "stall_over_copy": stall["this trainer"] / stall["copy in memory"],
        "fsync_over_stall": stall["torch.save + fsync"] / stall["this trainer"],
    }


def show_stall(found: dict[str, Any]) -> str:
    rows = []
    ours = found["contestants"]["this trainer"]["stall"]["median"]
    for name, values in found["contestants"].items():
        durable = values["durable"]
        rows.append([
            name, reporting.spread(values["stall"], 1e3), f"{values['stall']['median'] / ours:.2f}",
            "–" if durable is None else reporting.spread(durable, 1e3),
            f"{values['first_stall'] * 1e3:,.1f}",
        ])  # fmt: skip
    n = found["contestants"]["this trainer"]["stall"]["n"]
    head = ["", "held, ms", "held / ours", "durable, ms", "first time, ms"]
    return (f"{found['bytes'] / 1e6:,.0f} MB in {found['tensors']} tensors, {found['threads']} "
            f"threads, n = {n}; medians (quartiles)\n{reporting.table(head, rows)}\n"
            f"held: {found['stall_over_copy']:.2f} × the copy, 1/{found['fsync_over_stall']:.1f} "
            "of torch.save + fsync; the next forward and backward took "
            f"{reporting.spread(found['forward_backward']['beside_a_save'], 1e3)} ms beside the "
            f"save, {reporting.spread(found['forward_backward']['alone'], 1e3)} ms alone\n")


def measure_overhead(
    megabytes: float, ratio: float, threads: int, pairs: int, folder: Path
) -> dict[str, Any]:
    """Blocks of `BLOCK` steps with a save at their start and without, in turn.

    Args:
        ratio: s = state bytes / (bytes a second to the disk × seconds a step), by which the steps
            are made as long as needed.
        threads: that the steps compute with.
    """
    import torch

    torch.set_num_threads(threads)
    subject = make_subject(megabytes)
    ours = make_checkpointer(subject, folder / "overhead")
    ours.overlap = True

    def save() -> float:
        subject.state.progress.step += 1
        began = time.perf_counter()
        ours.save("periodic")
        ours.settle()
        return time.perf_counter() - began

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            subject.optimizer.zero_grad(set_to_none=True)
            subject.model(inputs).square().mean().backward()
            ours.finish_copy()
            subject.optimizer.step()
        return time.perf_counter() - began

    rate = subject.bytes / statistics.median([save() for _ in range(5)][1:])
    step_s = subject.bytes / rate / ratio
    batch = 256
    for _ in range(5):
        inputs = torch.randn(batch, subject.width)
        batch = max(8, round(batch * step_s / min(steps(1) for _ in range(3))))
    # Wall time, and the processor time of the training thread, which other programs don't prolong.
    blocks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(2 * pairs):
        saves = turn % 2 == 1
        began = time.perf_counter(), time.thread_time()
        if saves:
            subject.state.progress.step += 1
            ours.save("periodic")
        steps(BLOCK)
        blocks[saves].append((time.perf_counter() - began[0], time.thread_time() - began[1]))
        ours.finish_pending(must=True)
    ours.close()
    without = [wall for wall, _ in blocks[False]]
    costs, cpu_costs = [
        [a[clock] / b[clock] - 1 for a, b in zip(blocks[True], blocks[False], strict=True)]
        for clock in (0, 1)
    ]
    return {
        "bytes": subject.bytes, "threads": threads, "bytes_per_s": rate,
        "step_s": statistics.median(without) / BLOCK,
        "s": subject.bytes / rate / (statistics.median(without) / BLOCK),
        "cost": reporting.summary(costs), "cpu_cost": reporting.summary(cpu_costs),
    }


def show_overhead(found: list[dict[str, Any]]) -> str:
    rows = [[f"{f['threads']}", f"{f['bytes'] / 1e6:,.0f}", f"{f['bytes_per_s'] / 1e6:,.0f}",
             f"{f['step_s'] * 1e3:,.0f}", f"{f['s']:.2f}", reporting.spread(f["cost"], 100, 2),
             reporting.spread(f["cpu_cost"], 100, 2), str(f["cost"]["n"])] for f in found]
    head = ["threads that compute", "MB", "MB/s durable", "step, ms", "s", "cost, %",
            "cost in the training thread's processor time, %", "n"]
    return f"a durable save every {BLOCK} steps\n{reporting.table(head, rows)}\n"


def measure_share(megabytes: float, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds until the state is durable: written by one process, and halved by two."""
    spawn = multiprocessing.get_context("spawn")
    size = int(megabytes * 1e6)
    whole, halves = [], []
    connections, writers = [], []
    for number in range(2):
        ours, theirs = spawn.Pipe()
        writers.append(spawn.Process(target=write_share, args=(theirs, folder / f"share{number}")))
        writers[-1].start()
        connections.append(ours)
    for step in range(1, repeats + 2):
        for taking, times in ((connections[:1], whole), (connections, halves)):
            began = time.perf_counter()
            for connection in taking:
                connection.send((2 * step + len(taking), size // len(taking)))
            for connection in taking:
                connection.recv()
            times.append(time.perf_counter() - began)
    for connection, writer in zip(connections, writers, strict=True):
        connection.send(None)
        writer.join()
    return {"bytes": size, "one": reporting.summary(whole[1:]),
            "two": reporting.summary(halves[1:])}


def write_share(connection: Any, folder: Path) -> None:
    """A process without torch that writes what it is told to."""
    from trainer.checkpoint.store import Store

    store, data = Store(folder, keep=1), b""
    while (task := connection.recv()) is not None:
        step, size = task
        data = data if len(data) == size else random.randbytes(size)
        with store.stage(step, generation=0) as stage:
            stage.write("state", data)
            stage.commit(kind="periodic")
        store.prune()
        connection.send(step)


def show_share(found: dict[str, Any]) -> str:
    rows = [[name, reporting.spread(found[key], 1e3), f"{found[key]['n']}"]
            for name, key in (("rank 0 writes all", "one"), ("two ranks write half each", "two"))]
    return (f"{found['bytes'] / 1e6:,.0f} MB\n"
            f"{reporting.table(['', 'durable, ms', 'n'], rows)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", default="10,100,1000", help="of the state in MB (%(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="(%(default)s)")
    parser.add_argument("--repeats", type=int, help="of each contestant; default: 20, at 1 GB 5")
    parser.add_argument("--threads", type=int, help="that copy and compute; default: all cores")
    parser.add_argument("--folder", type=Path, help="on the disk in question; default: here")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")

    import torch

    found: dict[str, Any] = {"machine": reporting.machine(), "stall": [], "overhead": []}
    say = (lambda text: None) if options.json else (lambda text: print(text, flush=True))
    say(reporting.describe(found["machine"]) + "\n")
    sizes = [float(size) for size in options.sizes.split(",")]
    threads = options.threads or found["machine"]["cores"]
    for size in sizes if "stall" in parts else ():
        torch.set_num_threads(threads)
        repeats = options.repeats or (20 if size < 500 else 5)
        with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
            found["stall"].append(measure_stall(size, repeats, Path(folder)))
        say(show_stall(found["stall"][-1]))
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder:
        size = min(sizes, key=lambda s: abs(s - 100))
        if "overhead" in parts:
            for ratio, busy in ((1.0, 1), (0.3, threads)):
                found["overhead"].append(
                    measure_overhead(size, ratio, busy, options.repeats or 8, Path(folder)))
            say(show_overhead(found["overhead"]))
        if "share" in parts:
            found["share"] = measure_share(size, options.repeats or 10, Path(folder))
            say(show_share(found["share"]))
    reporting.print_json("checkpoint", **found)


if __name__ == "__main__":
    reporting.finish(main)
