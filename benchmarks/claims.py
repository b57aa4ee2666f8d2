"""What is said to make training faster or smaller, measured: where does it hold on this machine?

    python -m benchmarks.claims [--parts optimizers,…] [--rounds N] [--quick] [--json]

optimizers   AdamW as a for-loop, foreach and fused, on many small tensors and on few large ones
compile      torch.compile of a small MLP's and the small CNN's training step
inference    a forward in inference_mode, in no_grad, and in neither
zero_grad    gradients set to None or to zero, with a forward and backward
bf16         autocast to bf16: what the forward keeps for the backward, and the step's time
recompute    activation checkpointing of each block, of every second, of none
loading      DataLoader workers in front of per-sample transforms; pinning (needs CUDA)

What a forward keeps is counted, not estimated: the bytes of all distinct storages that autograd
saves, without those of the parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import reporting
from benchmarks.turns import in_turn, ratios

CLAIMS = {
    "foreach": "foreach is usually faster than the for-loop (torch.optim docs)",
    "fused": "fused is usually the fastest of the three (torch.optim docs)",
    "compile": "torch.compile: ×1.43 in training, on 163 models on an A100 (PyTorch 2.0)",
    "inference": "inference_mode is faster than no_grad (torch docs)",
    "no_grad": "no_grad keeps nothing for a backward and is faster than neither (torch docs)",
    "set_to_none": "set_to_none needs less memory and can be a little faster (torch docs)",
    "bf16": "16-bit activations nearly halve memory (Micikevicius et al. 2018)",
    "recompute": "checkpointing: less memory for one more forward (Chen et al. 2016)",
    "workers": "num_workers > 0 overlaps loading with computing (PyTorch tuning guide)",
    "pinning": "pinned memory makes copies to the card faster (PyTorch tuning guide)",
}


@dataclass
class Finding:
    """A claim put to the test: ratios of times (before / after: above 1 is faster), and of bytes
    (after / before: below 1 is smaller)."""

    claim: str
    where: str
    faster: list[float] = field(default_factory=list)
    bytes: tuple[int, int] | None = None
    note: str = ""

    def summary(self) -> dict[str, Any]:
        """As JSON values; whether the claim holds is left to the bounds of the quartiles."""
        faster = reporting.summary(self.faster) if self.faster else None
        size = None if self.bytes is None or not self.bytes[0] else self.bytes[1] / self.bytes[0]
        return {"claim": self.claim, "says": CLAIMS[self.claim], "where": self.where,
                "speedup": faster, "bytes": self.bytes, "bytes_ratio": size, "note": self.note,
                "faster": verdict(faster)}


def verdict(speedup: Mapping[str, float] | None) -> str:
    """What the quartiles of the speed-up allow to say."""
    if speedup is None:
        return "not measured"
    if speedup["q1"] > 1:
        return "faster"
    return "slower" if speedup["q3"] < 1 else "no difference"


def kept_bytes(model: Any, run: Callable[[], Any]) -> int:
    """What autograd saves in `run`, in bytes: distinct storages, parameters left out."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # else a storage that is freed gives its address to the next

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(kept.values())


def optimizers(rounds: int) -> list[Finding]:
    """AdamW's three ways through the parameters."""
    import torch
    from torch import nn

    found = []
    for where, count, size in (("400 tensors of 1,000", 400, 1000),
                               ("8 tensors of 1,000,000", 8, 1_000_000)):
        steps: dict[str, Callable[[], Any]] = {}
        for name in ("for-loop", "foreach", "fused"):
            parameters = [nn.Parameter(torch.randn(size)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.randn(size)
            steps[name] = torch.optim.AdamW(parameters, lr=1e-3, foreach=name == "foreach",
                                            fused=name == "fused").step
        times = in_turn(steps, rounds, warm=2)
        for name in ("foreach", "fused"):
            found.append(Finding(name, where, ratios(times["for-loop"], times[name]),
                                 note="against the for-loop"))
        found.append(Finding("fused", where, ratios(times["foreach"], times["fused"]),
                             note="against foreach"))
    return found


def compiled(rounds: int) -> list[Finding]:
    """A training step with and without torch.compile."""
    import torch
    from torch import nn

    found = []
    for where, make, shape in (
        ("MLP 64-256-256-10, batch 32", functools.partial(_mlp, 64, 256), (32, 64)),
        ("small CNN, batch 32", _cnn, (32, 1, 28, 28)),
    ):  # fmt: skip
        inputs, labels = torch.randn(*shape), torch.randint(10, shape[:1])
        steps = {}
        for name in ("eager", "compiled"):
            torch.manual_seed(0)
            model: nn.Module = make()
            steps[name] = _step(torch.compile(model) if name == "compiled" else model,
                                inputs, labels)
        times = in_turn(steps, rounds, warm=3)
        found.append(Finding("compile", where, ratios(times["eager"], times["compiled"])))
    return found


def inference(rounds: int) -> list[Finding]:
    """A forward alone."""
    import torch

    found = []
    for where, model, shape in (
        ("MLP 64-64-64-10, batch 1", _mlp(64, 64), (1, 64)),
        ("small CNN, batch 64", _cnn(), (64, 1, 28, 28)),
    ):
        model.eval()
        inputs = torch.randn(*shape)
        modes = {"neither": contextlib.nullcontext, "no_grad": torch.no_grad,
                 "inference": torch.inference_mode}
        calls = 200 if shape[0] == 1 else 1  # a forward of one sample is too short for the clock

        def forward(mode: Callable[[], Any], model: Any = model, inputs: Any = inputs,
                    calls: int = calls) -> None:
            for _ in range(calls):
                with mode():
                    model(inputs)

        times = in_turn({name: functools.partial(forward, mode) for name, mode in modes.items()},
                        rounds, warm=2)
        kept = {name: kept_bytes(model, functools.partial(forward, mode, calls=1))
                for name, mode in modes.items()}
        found += [
            Finding("no_grad", where, ratios(times["neither"], times["no_grad"]),
                    (kept["neither"], kept["no_grad"])),
            Finding("inference", where, ratios(times["no_grad"], times["inference"])),
        ]  # fmt: skip
    return found


def zero_grad(rounds: int) -> list[Finding]:
    """Gradients between two steps: gone, or zeros that the backward adds to."""
    import torch

    where, inputs, labels = "small CNN, batch 32", torch.randn(32, 1, 28, 28), torch.randint(
        10, (32,))
    steps, held = {}, {}
    for to_none in (False, True):
        model = _cnn()
        steps[to_none] = _step(model, inputs, labels, to_none=to_none)
        steps[to_none]()
        model.zero_grad(set_to_none=to_none)
        held[to_none] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    times = in_turn({str(key): run for key, run in steps.items()}, rounds)
    return [Finding("set_to_none", where, ratios(times["False"], times["True"]),
                    (held[False], held[True]), "bytes: gradients held between steps")]


def bf16(rounds: int) -> list[Finding]:
    """A training step under autocast to bf16 and in fp32."""
    import torch

    found = []
    for where, make, shape in (
        ("small CNN, batch 32", _cnn, (32, 1, 28, 28)),
        ("GPT of 4 blocks, width 128, 4 × 128 tokens", _gpt, (4, 128)),
    ):
        model = make()
        inputs = torch.randint(256, shape) if len(shape) == 2 else torch.randn(*shape)
        labels = torch.randint(10, shape if len(shape) == 2 else shape[:1])
        steps = {name: _step(model, inputs, labels, autocast=name == "bf16")
                 for name in ("fp32", "bf16")}
        times = in_turn(steps, rounds)
        kept = {name: kept_bytes(model, run) for name, run in steps.items()}
        found.append(Finding("bf16", where, ratios(times["fp32"], times["bf16"]),
                             (kept["fp32"], kept["bf16"])))
    return found


def recompute(rounds: int) -> list[Finding]:
    """Activation checkpointing of a GPT's blocks, by this trainer's `precision.recompute_every`."""
    import torch

    from trainer.optim.activation_checkpointing import recompute as by_blocks

    inputs, labels = torch.randint(256, (4, 128)), torch.randint(10, (4, 128))
    steps, kept = {}, {}
    for every in (0, 1, 2):
        torch.manual_seed(0)
        model = _gpt()
        by_blocks(model, every)
        steps[str(every)] = _step(model, inputs, labels)
        kept[every] = kept_bytes(model, functools.partial(_loss, model, inputs, labels))
    times = in_turn(steps, rounds)
    return [Finding("recompute", f"GPT of 4 blocks, {name}", ratios(times["0"], times[str(every)]),
                    (kept[0], kept[every]))
            for every, name in ((1, "each block"), (2, "every 2nd block"))]


def loading(rounds: int) -> list[Finding]:
    """Per-sample transforms in front of the CNN, with loader processes and without."""
    import torch

    from benchmarks.loader import Trainee, other

    trainee, sources = Trainee(), {workers: other("PIL a sample", workers) for workers in (0, 1, 2)}
    times = in_turn({str(workers): functools.partial(trainee.step, source.batches)
                     for workers, source in sources.items()}, rounds)
    for source in sources.values():
        source.close()
    found = [Finding("workers", f"PIL transforms, small CNN, {workers} worker(s)",
                     ratios(times["0"], times[str(workers)])) for workers in (1, 2)]
    if not torch.cuda.is_available():
        return [*found, Finding("pinning", "–", note="needs a CUDA card")]
    copies = {}
    for name in ("pageable", "pinned"):
        batch = torch.randn(256, 3, 224, 224)
        batch = batch.pin_memory() if name == "pinned" else batch

        def copy(batch: torch.Tensor = batch) -> None:
            batch.to("cuda", non_blocking=True)
            torch.cuda.synchronize()

        copies[name] = copy
    times = in_turn(copies, rounds, warm=2)
    return [*found, Finding("pinning", "154 MB to the card",
                            ratios(times["pageable"], times["pinned"]))]


def _mlp(inputs: int, width: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 10))


def _cnn() -> Any:
    import torch

    from trainer.tasks.image_models import SmallCNN

    return SmallCNN().to(memory_format=torch.channels_last)


def _gpt() -> Any:
    from trainer.tasks.gpt import GPT

    return GPT(tokens=256, context=128, layers=4, heads=4, width=128)


def _loss(model: Any, inputs: Any, labels: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _step(
    model: Any, inputs: Any, labels: Any, *, to_none: bool = True, autocast: bool = False
) -> Callable[[], None]:
    """Forward, backward and update by fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _loss(model, inputs, labels)
        loss.backward()
        optimizer.step()

    return step


PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "optimizers": optimizers, "inference": inference, "zero_grad": zero_grad, "bf16": bf16,
    "recompute": recompute, "loading": loading, "compile": compiled,
}  # fmt: skip


def show(found: list[dict[str, Any]]) -> str:
    rows = []
    for finding in found:
        speed, size = finding["speedup"], finding["bytes_ratio"]
        rows.append([
            finding["says"], finding["where"],
            "–" if speed is None else reporting.spread(speed, digits=2),
            "–" if size is None else f"{size:.2f}", finding["faster"], finding["note"],
        ])  # fmt: skip
    return reporting.table(["claimed", "where", "times as fast", "bytes, of before", "time",
                            "note"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 turns, nothing compiled")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rounds = 5 if options.quick else options.rounds
    if options.quick:
        parts = [part for part in parts if part != "compile"]
    machine = reporting.machine()
    found = [finding.summary() for part in parts for finding in PARTS[part](rounds)]
    if not options.json:
        print(reporting.describe(machine) + f"; n = {rounds}; medians (quartiles) of ratios turn "
              "by turn\n")
        print(show(found))
    reporting.print_json("claims", machine=machine, rounds=rounds, findings=found)


if __name__ == "__main__":
    reporting.finish(main)
