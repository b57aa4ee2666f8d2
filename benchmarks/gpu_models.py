"""The models of `benchmarks.gpu`, and a training step of each with a set of optimisations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet

from trainer.optim.precision import set_tf32
from trainer.tasks.gpt import GPT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lever:
    """The settings of a step, named after the last one that was added."""

    name: str
    tf32: bool = False
    bf16: bool = False
    channels_last: bool = False
    compile: str | None = None
    fused: bool = False
    prefetch: bool = False


def levers(*, images: bool) -> list[Lever]:
    """From plain fp32, one setting more at a time; channels_last only for images."""
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
    """A model to train, and its batches."""

    name: str
    make: Callable[[], nn.Module]
    batch: int
    """Images or sequences per step."""
    host: Callable[[int], tuple[Tensor, Tensor]]
    """Makes a batch on the host: inputs (uint8 images or int64 tokens) and labels."""
    images: bool = True


def subjects(*, tiny: bool) -> list[Subject]:
    """ResNet-50 (224²), ResNet-18 (32²), a GPT of 124M parameters; `tiny` versions for a CPU."""
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
    """A subject on the device with a lever: `step()` is one optimizer step from host memory."""

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
        self._batches = _prefetched(batches, device) if lever.prefetch else _copied(batches, device)

    def step(self) -> None:
        """Copy a batch, forward, backward, update; does not wait for the card."""
        if self._device.type == "cuda":
            set_tf32(self.lever.tf32)
            if self.lever.compile == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
        self.optimizer.zero_grad(set_to_none=True)
        inputs, labels = next(self._batches)
        self.loss(inputs, labels).backward()
        self.optimizer.step()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch on the device, where images are normalised."""
        if self.subject.images:
            inputs = inputs.to(memory_format=self._format).float().sub_(128).div_(64)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.lever.bf16):
            logits = self._forward(inputs)
        return functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())

    def close(self) -> None:
        """Release the card's memory."""
        self._forward = self.model = self.optimizer = self._batches = None  # type: ignore[assignment]


def _copied(batches: list[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Any]:
    """Batches from pageable memory, whose copy is waited for."""
    while True:
        for batch in batches:
            yield tuple(part.to(device) for part in batch)


def _prefetched(batches: list[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[Any]:
    """Batches from pinned memory, copied a step ahead on a separate stream."""
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


def count_flops(trainee: Trainee) -> int:
    """Operations of a forward and backward of the whole batch (attention without its causal
    half)."""
    few = min(2, trainee.subject.batch)
    inputs, labels = (part.to(trainee._device) for part in trainee.subject.host(few))
    with FlopCounterMode(display=False) as counter:
        trainee.loss(inputs, labels).backward()
    trainee.optimizer.zero_grad(set_to_none=True)
    return counter.get_total_flops() * trainee.subject.batch // few


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """File → name → tensor, as in a checkpoint."""
    moments = {f"{number}.{name}": value for number, entry in enumerate(optimizer.state.values())
               for name, value in entry.items() if isinstance(value, Tensor)}
    return {"model": dict(model.state_dict()), "optimizer": moments}
