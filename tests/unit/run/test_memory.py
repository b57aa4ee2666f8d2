"""Memory figures: what they count."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

from trainer.config.schema import Optim
from trainer.optim import optimizers
from trainer.run import memory
from trainer.telemetry.step_timing import resident_mb


@pytest.mark.parametrize("settings", [Optim(), Optim(name="sgd"), Optim(name="sgd", momentum=0),
                                      Optim(options=("amsgrad=true",))])
def test_an_optimizers_state_is_known_before_it_is_allocated(settings):
    model = nn.Linear(1024, 1024)
    optimizer = optimizers.make_optimizer(settings, model)
    before = memory.optimizer_mb(optimizer)
    expected = optimizers.expected_state(optimizer)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()

    assert before == pytest.approx(memory.optimizer_mb(optimizer), rel=1e-3)
    assert {p: {key: like.shape for key, like in entries.items()}
            for p, entries in expected.items()} == {
        p: {key: t.shape for key, t in entries.items() if isinstance(t, torch.Tensor)
            and (key != "step" or "step" in expected.get(p, {}))}
        for p, entries in optimizer.state.items() if p in expected}


def test_the_peak_contains_memory_that_was_in_use():
    before = memory.peak_mb()
    size = int((before + 64) * memory.MIB - resident_mb() * 1e6)
    # New pages: an allocator would reuse freed ones, which are resident already.
    ballast = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)

    assert memory.peak_mb() >= before + 32
    assert ballast[-1] == 1
