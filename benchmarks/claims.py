"""Do published claims of speed and memory in training hold on this machine?

    python -m benchmarks.claims [--parts optimizers,…] [--rounds N] [--quick]

What a forward keeps is counted: the bytes of all distinct storages that autograd saves, without
those of the parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import reporting
from benchmarks.reporting import in_turn, ratios
from trainer.optim.activation_checkpointing import recompute as recompute_blocks
from trainer.tasks.gpt import GPT
from trainer.tasks.image_models import SmallCNN

CLAIMS = {
    "foreach": "foreach is usually faster than the for-loop (torch.optim docs)",
    "fused": "fused is usually the fastest of the three (torch.optim docs)",
    "compile": "torch.compile: ×1.43 in training, on 163 models on an A100 (PyTorch 2.0)",
    "no_grad": "no_grad keeps nothing, and is faster than grad mode (torch docs)",
    "bf16": "16-bit activations nearly halve memory (Micikevicius et al. 2018)",
    "recompute": "checkpointing: less memory for one more forward (Chen et al. 2016)",
}


@dataclass
class Finding:
    """A claim and what was measured: ratios of times (before / after: above 1 is faster), and bytes
    before and after."""

    claim: str
    where: str
    faster: list[float]
    bytes: tuple[int, int] | None = None


def verdict(speedup: Mapping[str, float]) -> str:
    """What the quartiles of the speed-up show."""
    if speedup["q1"] > 1:
        return "faster"
    return "slower" if speedup["q3"] < 1 else "no difference"


def kept_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Bytes that autograd saves in `run`: distinct storages without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # otherwise the address of a freed storage is used again

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(kept.values())


def optimizers(rounds: int) -> list[Finding]:
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
        found += [Finding(name, f"{where}, against {before}", ratios(times[before], times[name]))
                  for name, before in (("foreach", "for-loop"), ("fused", "foreach"),
                                       ("fused", "for-loop"))]
    return found


def compiled(rounds: int) -> list[Finding]:
    found = []
    for where, make, shape in (("MLP, batch 32", functools.partial(_mlp, 256), (32, 64)),
                               ("small CNN, batch 32", _cnn, (32, 1, 28, 28))):
        inputs, labels = torch.randn(*shape), torch.randint(10, shape[:1])
        times = in_turn({"eager": _step(make(), inputs, labels),
                         "compiled": _step(torch.compile(make()), inputs, labels)}, rounds, warm=3)
        found.append(Finding("compile", where, ratios(times["eager"], times["compiled"])))
    return found


def no_grad(rounds: int) -> list[Finding]:
    found = []
    for where, model, shape, calls in (
        ("MLP, batch 1", _mlp(64), (1, 64), 200),  # one forward is too short for the clock
        ("small CNN, batch 64", _cnn(), (64, 1, 28, 28), 1),
    ):
        model.eval()
        inputs = torch.randn(*shape)

        def forward(mode: Callable[[], Any], calls: int, model: nn.Module = model,
                    inputs: Tensor = inputs) -> None:
            for _ in range(calls):
                with mode():
                    model(inputs)

        modes = (contextlib.nullcontext, torch.no_grad)
        times = in_turn({str(mode): functools.partial(forward, mode, calls) for mode in modes},
                        rounds, warm=2)
        kept = [kept_bytes(model, functools.partial(forward, mode, 1)) for mode in modes]
        found.append(Finding("no_grad", where, ratios(*times.values()), (kept[0], kept[1])))
    return found


def bf16(rounds: int) -> list[Finding]:
    found = []
    for where, model, inputs, labels in (
        ("small CNN, batch 32", _cnn(), torch.randn(32, 1, 28, 28), torch.randint(10, (32,))),
        ("GPT of 4 blocks, 4 × 128 tokens", _gpt(), torch.randint(256, (4, 128)),
         torch.randint(10, (4, 128))),
    ):
        steps = {name: _step(model, inputs, labels, autocast=name == "bf16")
                 for name in ("fp32", "bf16")}
        times = in_turn(steps, rounds)
        found.append(Finding("bf16", where, ratios(times["fp32"], times["bf16"]),
                             (kept_bytes(model, steps["fp32"]), kept_bytes(model, steps["bf16"]))))
    return found


def recompute(rounds: int) -> list[Finding]:
    inputs, labels = torch.randint(256, (4, 128)), torch.randint(10, (4, 128))
    steps, kept = {}, {}
    names = {0: "none", 1: "each block", 2: "every second block"}
    for every, name in names.items():
        model = _gpt()
        recompute_blocks(model, every)
        steps[name] = _step(model, inputs, labels)
        kept[name] = kept_bytes(model, functools.partial(_loss, model, inputs, labels))
    times = in_turn(steps, rounds)
    return [Finding("recompute", f"GPT of 4 blocks, {name}", ratios(times["none"], times[name]),
                    (kept["none"], kept[name])) for name in ("each block", "every second block")]


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 10))


def _cnn() -> nn.Module:
    return SmallCNN().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _gpt() -> nn.Module:
    return GPT(tokens=256, context=128, layers=4, heads=4, width=128)


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _step(
    model: Any, inputs: Tensor, labels: Tensor, *, autocast: bool = False
) -> Callable[[], None]:
    """Forward, backward and update by fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _loss(model, inputs, labels)
        loss.backward()
        optimizer.step()

    return step


PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "optimizers": optimizers, "no_grad": no_grad, "bf16": bf16,
    "recompute": recompute, "compile": compiled,
}  # fmt: skip


def show(found: list[Finding]) -> str:
    rows = [[CLAIMS[finding.claim], finding.where,
             reporting.spread(reporting.summary(finding.faster), digits=2),
             f"{finding.bytes[1] / finding.bytes[0]:.2f}" if finding.bytes else "–",
             verdict(reporting.summary(finding.faster))] for finding in found]
    return reporting.table(["claim", "measured on", "times as fast", "bytes", "time"], rows)


def main() -> None:
    parser = reporting.parser("claims", __doc__)
    parser.add_argument("--parts", type=reporting.some_of(PARTS), default=",".join(PARTS),
                        help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 turns, nothing compiled")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    machine = reporting.machine()
    found = [finding for part in options.parts if not (options.quick and part == "compile")
             for finding in PARTS[part](rounds)]
    print(f"n = {rounds}; medians (quartiles) of ratios turn by turn")
    print(show(found))
    reporting.print_json("claims", machine=machine, rounds=rounds,
                         findings=[asdict(finding) for finding in found])


if __name__ == "__main__":
    reporting.finish(main)
