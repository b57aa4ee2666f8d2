"""Tasks whose models have buffers that begin to change late or take another shape, modules in
evaluation mode, or quantization; and an optimizer with weights for evaluation."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from trainer import Outcome

WIDTH = 6


class Late(nn.Linear):
    """A mean that changes from the fifth forward on, without a version: by `data`."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x):
            self.calls += 1
            if self.calls > 4:
                self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


class Grows(nn.Linear):
    """Minima of the size of the first batch, and a queue that grows from the fourth forward on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        self.register_buffer("least", torch.zeros(1))
        self.register_buffer("queue", torch.zeros(1, WIDTH))
        self.register_buffer("positions", torch.arange(1.0), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.least.numel() == 1:
            self.least.resize_(WIDTH).fill_(0.0)
        if len(self.positions) < WIDTH:
            self.positions.data = torch.arange(float(WIDTH))
        if self.training and len(x):
            self.least.copy_(torch.minimum(self.least, x.detach().amin(0)))
            self.calls += 1
            if self.calls > 3:
                self.queue.data = torch.cat([self.queue, x.detach()[:1]])[-5:]
        return super().forward(x - self.least - self.queue.mean(0) + self.positions)


class Frozen(nn.Module):
    """A frozen body in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.body.requires_grad_(False).eval()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert not any(module.training for module in self.body.modules())
        return self.head(self.body(x))


class NoReturn(nn.Module):
    """A frozen body by overrides of `train` and `eval` that return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5)), nn.Linear(8, 1)
        self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.body.eval()

    def eval(self) -> None:  # type: ignore[override]
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.body[1].training
        return self.head(self.body(x))


def quantized() -> nn.Module:
    """Quantization-aware training by torch.ao, with its default observers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favour of torchao
        from torch.ao import quantization

        model = nn.Sequential(quantization.QuantStub(), nn.Linear(WIDTH, 8), nn.ReLU(),
                              nn.Linear(8, 1), quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qat_qconfig()  # type: ignore[assignment]
        return quantization.prepare_qat(model.train())


MODELS = {"late": Late, "grows": Grows, "frozen": Frozen, "no return": NoReturn,
          "quantized": quantized, "linear": lambda: nn.Linear(WIDTH, 1)}


@dataclasses.dataclass(frozen=True)
class Changing:
    """Sums of random numbers."""

    way: str = "linear"

    def model(self) -> nn.Module:
        return MODELS[self.way]()

    def dataset(self, split: str) -> Dataset:
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(96 if split == "train" else 10, WIDTH, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> Outcome:
        x, y = batch
        return Outcome((model(x) - y).square().sum(), len(x))


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv:2405.15682): a step needs the weights of `train()`, and a
    validation those of `eval()`, an average that the weights do not hold."""

    def __init__(self, groups: Any, lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "train_mode": False, "k": 0})

    def _exchange(self, weight: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                group["train_mode"] = training
                for parameter in group["params"]:
                    if parameter in self.state:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def eval(self) -> None:
        self._exchange(1 - 1 / 0.9, training=False)

    def train(self) -> None:
        self._exchange(1 - 0.9, training=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "call train() before the step"
            group["k"] += 1
            for parameter in group["params"]:
                assert parameter.grad is not None
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, 1 / group["k"])
                parameter.sub_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"])))
                z.sub_(parameter.grad, alpha=group["lr"])
