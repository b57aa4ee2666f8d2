"""Memory figures: what they count, and that measuring changes nothing."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.config.schema import Optim
from trainer.optim import optimizers
from trainer.run import memory
from trainer.telemetry.step_timing import resident_mb

N = 64
BYTES = 4 * N


class Tower(nn.Module):
    """Four times 32 numbers, in two parts."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
            for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.recompute else part(x)
        return x


def measured(model: nn.Module, undo=lambda: None) -> float | None:
    """MiB saved between a forward and backward of N samples."""
    x = torch.ones(N, 32)
    return memory.activations(model, lambda: model(x).sum().backward(), undo)


def test_activations_are_the_input_and_each_tanh_once():
    assert measured(Tower()) == pytest.approx(5 * 32 * BYTES / memory.MIB)


def test_recomputed_blocks_keep_their_inputs_and_one_blocks_activations_at_a_time():
    whole, recomputed = measured(Tower()), measured(Tower(recompute=True))

    assert whole is not None
    assert recomputed is not None
    assert 2 * 32 * BYTES / memory.MIB <= recomputed < whole


def test_gradients_are_those_of_a_backward_that_is_not_measured():
    seen, plain = Tower(), Tower()
    measured(seen)
    plain(torch.ones(N, 32)).sum().backward()

    for a, b in zip(seen.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


class Refusing(nn.Linear):
    """Uses torch.func, which doesn't support saved tensor hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda weight: (x @ weight.T).square().sum())(self.weight)
        return super().forward(x) + slope.sum()


def test_a_forward_that_does_not_support_hooks_is_run_again_without_them():
    model, undone = Refusing(32, 1), []

    assert measured(model, lambda: undone.append(True)) is None
    assert undone == [True]
    assert model.weight.grad is not None


@pytest.mark.parametrize("settings", [Optim(), Optim(name="sgd"), Optim(name="sgd", momentum=0)])
def test_an_optimizers_state_is_known_before_it_is_allocated(settings):
    model = nn.Linear(1024, 1024)
    optimizer = optimizers.make_optimizer(settings, model)
    before = memory.optimizer_mb(optimizer)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()

    assert before == pytest.approx(memory.optimizer_mb(optimizer), rel=1e-3)


def test_the_state_of_another_optimizer_is_known_after_an_update():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adagrad(model.parameters())  # allocates its state at once
    optimizer.state.clear()

    assert memory.optimizer_mb(optimizer) is None
    assert "optimizer" not in memory.MemoryUse().summary_line(model, optimizer)


def test_the_peak_contains_memory_that_was_in_use():
    before = memory.peak_mb()
    size = int((before + 64) * memory.MIB - resident_mb() * 1e6)
    # New pages: an allocator would reuse freed ones, which are resident already.
    ballast = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)

    assert memory.peak_mb() >= before + 32
    assert ballast[-1] == 1
