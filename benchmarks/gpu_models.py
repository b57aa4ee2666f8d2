"""The models that `benchmarks.gpu` trains on a card, and a step of each under a set of levers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.optim.precision import set_tf32

UNTOUCHED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations that make memory and leave it as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lever:
    """A step's settings. Each lever of `LEVERS` keeps what those before it have set."""

    name: str
    tf32: bool = False
    bf16: bool = False
    channels_last: bool = False
    compile: str | None = None
    fused: bool = False
    prefetch: bool = False


def levers(*, images: bool) -> list[Lever]:
    """From plain fp32 on, one more at a time; for a model without images no channels_last."""
    changes: list[dict[str, Any]] = [
        {"name": "fp32"}, {"name": "tf32", "tf32": True}, {"name": "bf16", "bf16": True},
        *([{"name": "channels_last", "channels_last": True}] if images else []),
        {"name": "compile", "compile": "default"}, {"name": "fused AdamW", "fused": True},
        {"name": "reduce-overhead", "compile": "reduce-overhead"},
        {"name": "prefetch", "prefetch": True},
    ]  # fmt: skip
    found = [Lever(**changes[0])]
    for change in changes[1:]:
        found.append(dataclasses.replace(found[-1], **change))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to train, and batches for it.

    Attributes:
        batch: images, or sequences, a step.
        host: makes a batch on the host: inputs (uint8 images or int64 tokens) and labels.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: int
    host: Callable[[int], tuple[Tensor, Tensor]]
    images: bool = True


def subjects(*, tiny: bool) -> list[Subject]:
    """ResNet-50 (224²), ResNet-18 (32²), a GPT of 124M parameters; `tiny`: the same, small."""
    from torchvision.models import resnet

    from trainer.tasks.gpt import GPT

    def pictures(size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lambda count: (torch.randint(256, (count, 3, size, size), dtype=torch.uint8),
                              torch.randint(classes, (count,)))

    def resnet50() -> nn.Module:
        return resnet.ResNet(resnet.Bottleneck, [1] * 4 if tiny else [3, 4, 6, 3])

    def resnet18() -> nn.Module:
        model = resnet.ResNet(resnet.BasicBlock, [1 if tiny else 2] * 4, num_classes=10)
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # as is usual for 32x32
        model.maxpool = nn.Identity()
        return model

    gpt = ({"tokens": 64, "context": 16, "layers": 2, "heads": 2, "width": 32} if tiny else
           {"tokens": 50304, "context": 1024, "layers": 12, "heads": 12, "width": 768})

    def text(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(gpt["tokens"], (count, gpt["context"] + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return [
        Subject(name="ResNet-50, 224²", make=resnet50, batch=2 if tiny else 256,
                host=pictures(32 if tiny else 224, 1000)),
        Subject(name="ResNet-18, 32²", make=resnet18, batch=2 if tiny else 512,
                host=pictures(32, 10)),
        Subject(name="GPT, 124M", make=lambda: GPT(**gpt), batch=2 if tiny else 8, host=text,
                images=False),
    ]


class Trainee:
    """A subject on the device under a lever: `step()` is one optimizer step from host memory."""

    def __init__(self, subject: Subject, lever: Lever, device: torch.device, *,
                 backend: str = "inductor") -> None:
        torch.manual_seed(0)
        self.subject, self.lever, self._device = subject, lever, device
        self._format = torch.channels_last if lever.channels_last else torch.contiguous_format
        self.model = subject.make().to(device)
        if lever.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        options: dict[str, Any] = {"backend": backend}
        if backend == "inductor" and lever.compile is not None:
            options["mode"] = lever.compile
        self._forward = torch.compile(self.model, **options) if lever.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=lever.fused,
                                           foreach=not lever.fused)
        batches = [subject.host(subject.batch) for _ in range(3)]
        self.host_bytes = sum(part.nbytes for part in batches[0])
        self._batches = _prefetched(batches, device) if lever.prefetch else _copied(batches, device)

    def step(self) -> None:
        """Copy a batch, forward, backward, update; waits for nothing on the card."""
        if self._device.type == "cuda":
            set_tf32(self.lever.tf32)
            if self.lever.compile == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        inputs, labels = next(self._batches)
        self.loss(inputs, labels).backward()
        self.optimizer.step()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Of a batch on the device; images are normalised there."""
        if self.subject.images:
            inputs = inputs.to(memory_format=self._format).float().sub_(128).div_(64)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.lever.bf16):
            logits = self._forward(inputs)
        return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    def close(self) -> None:
        """Let go of what the card holds for it."""
        self._forward = self.model = self.optimizer = self._batches = None  # type: ignore[assignment]


def _copied(batches: list[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Any]:
    """From pageable memory, which the copy waits for."""
    while True:
        for batch in batches:
            yield tuple(part.to(device) for part in batch)


def _prefetched(batches: list[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Any]:
    """From pinned memory, a step ahead, by a stream of its own."""
    if device.type != "cuda":
        yield from _copied(batches, device)
    pinned = [tuple(part.pin_memory() for part in batch) for batch in batches]
    stream = torch.cuda.Stream(device)

    def fetch(number: int) -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            return tuple(part.to(device, non_blocking=True)
                         for part in pinned[number % len(pinned)])

    ahead, number = fetch(0), 0
    while True:
        number += 1
        torch.cuda.current_stream().wait_stream(stream)
        for part in ahead:
            part.record_stream(torch.cuda.current_stream())
        ready, ahead = ahead, fetch(number)
        yield ready


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, each on its own; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:
        result = function(*args, **(kwargs or {}))
        sources = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in sources if t.numel()}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if function.overloadpacket.__name__ in UNTOUCHED:
            return result
        is_view = made and not function._schema.is_mutable and all(
            t.numel() and t.untyped_storage().data_ptr() in known for t in made)
        if not is_view:
            self.bytes += sum(t.numel() * t.element_size() for t in (*sources, *made))
        return result


def count_flops(trainee: Trainee) -> int:
    """Of a forward and backward of the whole batch (attention without its causal half)."""
    from torch.utils.flop_counter import FlopCounterMode

    few = min(2, trainee.subject.batch)
    inputs, labels = (part.to(trainee._device) for part in trainee.subject.host(few))
    with FlopCounterMode(display=False) as counter:
        trainee.loss(inputs, labels).backward()
    trainee.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops() * trainee.subject.batch // few


def count_traffic(trainee: Trainee) -> int:
    """Bytes that the operations of one step read and write, if none is fused with another."""
    with Traffic() as traffic:
        trainee.step()
    return traffic.bytes
