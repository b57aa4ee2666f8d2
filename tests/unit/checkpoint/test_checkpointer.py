"""An asynchronous save contains the state of the step boundary at which it was requested."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.synthetic_state import Subject, make_checkpointer, make_subject
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.saved_state import SavedState
from trainer.config import schema
from trainer.storage import tensorfile

LIMIT_S = 100.0


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    return make_subject(10)  # its large tensors have 140 kB each


@pytest.fixture
def checkpoint(subject: Subject, tmp_path: Path) -> Iterator[Checkpointer]:
    made = make_checkpointer(subject, tmp_path)
    made.overlap = True
    yield made
    made.abandon()
    made.store.close()


@pytest.fixture
def gate(checkpoint: Checkpointer) -> threading.Event:
    """Blocks the writer until it is set."""
    opened = threading.Event()
    checkpoint._writer.submit(opened.wait, LIMIT_S)
    return opened


def test_an_update_waits_until_the_previous_state_is_copied(
        subject: Subject, checkpoint: Checkpointer, gate: threading.Event) -> None:
    expected = _copy(subject)

    def update() -> None:
        checkpoint.finish_copy()
        _change(subject)

    subject.state.progress.step = 1
    checkpoint.save("periodic")
    updating = threading.Thread(target=update)
    updating.start()
    updating.join(0.1)
    waited = updating.is_alive()
    gate.set()
    updating.join(LIMIT_S)
    checkpoint.finish_pending(must=True)

    assert waited
    assert _same(_saved(checkpoint, 1), expected)
    assert not _same(_copy(subject), expected)


def test_buffers_are_copied_at_once_since_the_next_forward_moves_them(
        tmp_path: Path, subject: Subject, checkpoint: Checkpointer, gate: threading.Event) -> None:
    subject.model.register_buffer("seen", torch.zeros(100_000))
    subject.state.__post_init__()  # as if the model had been made with it
    subject.state.progress.step = 1

    checkpoint.save("periodic")
    subject.model.seen.add_(1)
    gate.set()
    checkpoint.finish_pending(must=True)

    assert _saved(checkpoint, 1)["model.safetensors"]["seen"].sum() == 0


def test_a_forward_that_changes_parameters_costs_one_save_and_the_next_is_exact(
    subject: Subject, checkpoint: Checkpointer, gate: threading.Event,
    capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint._config = schema.Checkpoint(on_error="continue")
    subject.state.progress.step = 1
    checkpoint.save("periodic")
    with torch.no_grad():
        subject.model[0][1].weight.clamp_(min=0)  # as some models do in their forward
    gate.set()
    checkpoint.finish_pending()
    expected = _copy(subject)

    subject.state.progress.step = 2
    checkpoint.save("periodic")
    with torch.no_grad():
        subject.model[0][1].weight.add_(1)
    checkpoint.finish_pending(must=True)

    assert [info.step for info in checkpoint.store.checkpoints()] == [2]
    assert _same(_saved(checkpoint, 2), expected)
    assert "a forward changed parameters" in capsys.readouterr().err


def test_a_loaded_checkpoint_is_not_reported_as_a_new_save(
        subject: Subject, checkpoint: Checkpointer) -> None:
    subject.state.progress.step = 1
    checkpoint.save("periodic")
    checkpoint.finish_pending(must=True)
    reported = checkpoint.has_unreported_save  # all ranks would drop the lines up to step 1
    state = SavedState.read(checkpoint.store.folder / "step-00000001")

    checkpoint.load(CheckpointRef(1, 0, 0, state, tensors=_saved(checkpoint, 1)))

    assert reported
    assert not checkpoint.has_unreported_save  # an outstanding validation may have added a line


def _copy(subject: Subject) -> dict[str, dict[str, Tensor]]:
    return {file: {name: tensor.clone() for name, tensor in tensors.items()}
            for file, tensors in subject.state.tensors().items()}


def _change(subject: Subject) -> None:
    for parameter in subject.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    subject.optimizer.step()


def _saved(checkpoint: Checkpointer, step: int) -> dict[str, Any]:
    return {path.name: tensorfile.load_tensors(path)
            for path in checkpoint.store.verify(step).path.glob("*.safetensors")}


def _same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[file].keys() == b[file].keys()
        and all(torch.equal(a[file][name], b[file][name]) for name in a[file]) for file in a)
