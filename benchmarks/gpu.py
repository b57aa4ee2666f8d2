"""What does each optimisation gain on one CUDA card, and for how long does a save stall it?

    python -m benchmarks.gpu [--rounds N] [--limit-s 440]
    python -m benchmarks.gpu --dry-run

Each optimisation is added to those before it. All versions of a model are built and warmed up
first, then take turns. `--dry-run` makes a step of each on the CPU with tiny models, compiled
without code generation: it shows that the script works, and prints no figures.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet

from benchmarks import reporting
from benchmarks.reporting import in_turn, ratios
from trainer.checkpoint.snapshot import Snapshot
from trainer.optim.precision import set_tf32
from trainer.tasks.gpt import GPT

WARM_UP = 4
TURN_S = 0.5
"""About how long a turn takes, in steps of at least one."""
LEVERS = ("fp32", "tf32", "bf16", "channels_last", "compile", "fused AdamW")
"""Optimisations, each used with those before it. channels_last is for images only."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to train, and its batches."""

    name: str
    make: Callable[[], nn.Module]
    batch: int  # images or sequences per step
    host: Callable[[int], tuple[Tensor, Tensor]]
    """Makes a batch on the host: inputs (uint8 images or int64 tokens) and labels."""
    images: bool = True


def subjects(*, tiny: bool) -> list[Subject]:
    """ResNet-50 (224²) and a GPT of 124M parameters; `tiny` versions for a CPU."""
    size = 32 if tiny else 224
    gpt = ({"tokens": 64, "context": 16, "layers": 2, "heads": 2, "width": 32} if tiny else
           {"tokens": 50304, "context": 1024, "layers": 12, "heads": 12, "width": 768})

    def pictures(count: int) -> tuple[Tensor, Tensor]:
        return (torch.randint(256, (count, 3, size, size), dtype=torch.uint8),
                torch.randint(1000, (count,)))

    def text(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(gpt["tokens"], (count, gpt["context"] + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    blocks = [1] * 4 if tiny else [3, 4, 6, 3]
    return [Subject("ResNet-50, 224²", lambda: resnet.ResNet(resnet.Bottleneck, blocks),
                    2 if tiny else 256, pictures),
            Subject("GPT, 124M", lambda: GPT(**gpt), 2 if tiny else 8, text, images=False)]


class Trainee:
    """A subject on the device with some levers: `step()` is one optimizer step from host memory.

    Args:
        compiles: whether torch.compile generates code, or only traces.
    """

    def __init__(self, subject: Subject, levers: Collection[str], device: torch.device, *,
                 compiles: bool = True) -> None:
        torch.manual_seed(0)
        self.subject, self._levers, self.device = subject, levers, device
        self._format = (torch.channels_last if "channels_last" in levers else
                        torch.contiguous_format)
        self.model = subject.make().to(device)
        self.model.to(memory_format=self._format)  # type: ignore[call-overload]
        self._forward: Any = self.model
        if "compile" in levers:
            self._forward = torch.compile(self.model, backend="inductor" if compiles else "eager")
        fused = "fused AdamW" in levers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused,
                                           foreach=not fused)
        self._batches = itertools.cycle([subject.host(subject.batch) for _ in range(3)])

    def step(self) -> None:
        """Copy a batch, forward, backward, update; does not wait for the card."""
        if self.device.type == "cuda":
            set_tf32("tf32" in self._levers)
        self.optimizer.zero_grad(set_to_none=True)
        inputs, labels = (part.to(self.device) for part in next(self._batches))
        self.loss(inputs, labels).backward()
        self.optimizer.step()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch on the device, where images are normalised."""
        if self.subject.images:
            inputs = inputs.to(memory_format=self._format).float().sub_(128).div_(64)
        with torch.autocast(self.device.type, torch.bfloat16, enabled="bf16" in self._levers):
            logits = self._forward(inputs)
        return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def count_flops(trainee: Trainee) -> int:
    """Operations of a forward and backward of the whole batch (attention without its causal
    half)."""
    few = min(2, trainee.subject.batch)
    inputs, labels = (part.to(trainee.device) for part in trainee.subject.host(few))
    with FlopCounterMode(display=False) as counter:
        trainee.loss(inputs, labels).backward()
    trainee.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops() * trainee.subject.batch // few


def matmul_rate(device: torch.device, size: int, repeats: int) -> float:
    """Operations per second of bf16 matrix products (2 for a multiply-add)."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply() -> None:
        for _ in range(10):
            torch.matmul(a, b)
        synchronise(device)

    times = in_turn({"matmul": multiply}, repeats, warm=3)["matmul"]
    return 10 * 2 * size**3 / reporting.summary(times)["median"]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(subject: Subject, device: torch.device, rate: float, rounds: int, deadline_s: float
            ) -> dict[str, Any]:
    """Lever → figures. Levers that would be built after the deadline are left out."""
    dry = device.type == "cpu"
    trainees, found, flops = dict[str, Trainee](), dict[str, dict[str, Any]](), 0

    def steps(trainee: Trainee, count: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(count):
            trainee.step()
        synchronise(device)
        return (time.perf_counter() - began) / count

    names = [name for name in LEVERS if subject.images or name != "channels_last"]
    for place, lever in enumerate(names):
        if time.monotonic() > deadline_s and not dry:
            print(f"left out, no time: {', '.join(names[place:])}")
            break
        began = time.perf_counter()
        trainee = Trainee(subject, names[:place + 1], device, compiles=not dry)
        flops = flops or count_flops(trainee)
        steps(trainee, 1 if dry else WARM_UP)
        found[lever] = {"warm_up_s": time.perf_counter() - began}
        if not dry:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps(trainee, 1)
            found[lever]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        trainees[lever] = trainee
    turns = {name: functools.partial(steps, trainee, 1 if dry else
                                     max(1, round(TURN_S / steps(trainee, 2))))
             for name, trainee in trainees.items()}
    times = in_turn(turns, rounds, warm=0 if dry else 1)
    previous = times["fp32"]
    for name, seconds in times.items():
        found[name] |= {
            "samples_per_s": reporting.summary([subject.batch / s for s in seconds]),
            "speedup": reporting.summary(ratios(previous, seconds)),
            "speedup_in_all": reporting.summary(ratios(times["fp32"], seconds)),
            "mfu": flops / reporting.summary(seconds)["median"] / rate,
        }  # fmt: skip
        previous = seconds
    del trainee, trainees, turns  # and their memory on the card
    gc.collect()
    if not dry:
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return {"batch": subject.batch, "flops_per_step": flops, "levers": found}


def show(name: str, found: dict[str, Any], *, dry: bool) -> str:
    rows = [[lever, *["–"] * 6] if dry else
            [lever, reporting.spread(f["samples_per_s"]), reporting.spread(f["speedup"], digits=2),
             f"{f['speedup_in_all']['median']:.2f}", f"{100 * f['mfu']:.1f}",
             f"{f['peak_bytes'] / 1e9:,.2f}", f"{f['warm_up_s']:.1f}"]
            for lever, f in found["levers"].items()]
    head = [name, "samples/s", "× the one before", "× fp32", "MFU, %", "memory of a step, GB",
            "ready after, s"]
    return f"{reporting.table(head, rows)}\n"


def measure_stall(
    subject: Subject, device: torch.device, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds for which a snapshot of a model and its optimizer holds the host, and until its
    copies are complete, which a GPU makes beside the next step."""
    trainee = Trainee(subject, ["fp32"], device)
    trainee.step()
    moments = {f"{number}.{name}": value
               for number, entry in enumerate(trainee.optimizer.state.values())
               for name, value in entry.items() if isinstance(value, Tensor)}
    snapshot, live = Snapshot(device), {"model": trainee.model.state_dict(), "optimizer": moments}

    def take(wait: Callable[[], None] = lambda: None) -> float:
        synchronise(device)
        began = time.perf_counter()
        snapshot.take(live)
        wait()
        return time.perf_counter() - began

    snapshot.allocate(live)
    times = in_turn({"host": take, "copies": functools.partial(take, snapshot.wait)}, repeats)
    return {name: reporting.summary(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = reporting.parser("gpu", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=440.0,
                        help="each model has its share; optimisations that are not built in it are "
                        "left out (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    dry = options.dry_run
    if not dry and not torch.cuda.is_available():
        parser.error("this needs a CUDA card; --dry-run tries the script on the CPU.")
    began_s, device = time.monotonic(), torch.device("cpu" if dry else "cuda")
    torch.backends.cudnn.benchmark = True
    chosen = subjects(tiny=dry)
    machine = reporting.machine()
    machine["card"] = None if dry else torch.cuda.get_device_name()
    rate = matmul_rate(device, 64 if dry else 8192, 3 if dry else 20)
    print("card: none, a dry run\n" if dry else f"card: {machine['card']}; bf16 matrix products: "
          f"{rate / 1e12:,.1f} TFLOP/s\n", flush=True)
    found = {}
    for number, subject in enumerate(chosen, start=1):
        # A third of a model's time is left for its turns.
        deadline_s = began_s + options.limit_s * (number - 1 / 3) / (len(chosen) + 1 / 3)
        found[subject.name] = measure(subject, device, rate, 1 if dry else options.rounds,
                                      deadline_s)
        print(show(subject.name, found[subject.name], dry=dry), flush=True)
    stall = measure_stall(chosen[-1], device, 2 if dry else 10)
    host, copies = ("–" if dry else reporting.spread(stall[name], 1e3)
                    for name in ("host", "copies"))
    print(f"a snapshot of {chosen[-1].name} holds the host for {host} ms, and its copies are "
          f"complete after {copies} ms\n{time.monotonic() - began_s:.0f} s in all")
    reporting.print_json("gpu", machine=machine, dry_run=dry, bf16_matmul_flops_per_s=rate,
                         models=found, stall=stall)


if __name__ == "__main__":
    reporting.finish(main)
