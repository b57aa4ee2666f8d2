"""The graph of the model for TensorBoard."""

from __future__ import annotations

import torch

from trainer.run.recorders import trace_graph
from trainer.tasks.spiral import Spiral


def test_a_graph_is_drawn_of_a_compiled_model_too_and_leaves_it_as_it_is():
    task = Spiral(points=9)
    model = task.model().train()
    before = torch.get_rng_state()

    def compiled(*inputs: torch.Tensor) -> None:
        raise AssertionError("called")

    model._compiled_call_impl = compiled

    definition = trace_graph(model, task.loss, [t[:2] for t in task.dataset("train").tensors])

    assert sum("Linear" in node.name for node in definition.node) >= 3
    assert model.training
    assert model._compiled_call_impl is compiled
    assert torch.equal(torch.get_rng_state(), before)
