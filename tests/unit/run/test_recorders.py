"""TensorBoard: the graph of the model, and the files of attempts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trainer.run.recorders import trace_graph
from trainer.tasks.spiral import Spiral
from trainer.telemetry.tensorboard import EventFile, TensorBoard


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


def test_attempts_that_fail_before_their_first_scalar_leave_no_file(tmp_path: Path) -> None:
    for attempt in range(9):
        board = TensorBoard(tmp_path / "board", every=1, first=attempt)
        board.introduce(["a line"], attempt)
        board.close()

    assert len(list((tmp_path / "board/train").iterdir())) == 1


def test_values_too_near_to_each_other_for_bins_have_no_histogram(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "board", first=0)
    for values in ([1e17, 1e17], [2.0, np.nextafter(2.0, 3.0)]):
        file.histogram("norms", np.array(values), step=1)
    file.close()
