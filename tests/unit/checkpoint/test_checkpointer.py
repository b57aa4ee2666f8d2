"""An asynchronous save contains the state of the step boundary at which it was requested."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.synthetic_state import Subject, make_checkpointer, make_subject
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.restore import CheckpointRef
from trainer.checkpoint.saved_state import SavedState
from trainer.storage import tensorfile

LIMIT_S = 100.0


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    return make_subject(10)  # its large tensors have 140 kB each


@pytest.fixture
def checkpoint(subject: Subject, tmp_path: Path) -> Iterator[Checkpointer]:
    made = make_checkpointer(subject, tmp_path)
    yield made
    made.abandon()
    made.store.close()


@pytest.fixture
def gate(checkpoint: Checkpointer) -> threading.Event:
    """Blocks the writer until it is set."""
    opened = threading.Event()
    checkpoint._writer.submit(opened.wait, LIMIT_S)
    return opened


def test_a_save_holds_the_state_at_which_it_was_requested(
    subject: Subject, checkpoint: Checkpointer, gate: threading.Event
) -> None:
    subject.model.register_buffer("seen", torch.zeros(100_000))
    subject.state.__post_init__()  # as if the model had been made with it
    subject.state.progress.step = 1
    expected = _copy(subject)

    checkpoint.save("periodic")
    subject.model.seen.add_(1)
    _change(subject)
    gate.set()
    checkpoint.finish_pending(must=True)

    assert _same(_saved(checkpoint, 1), expected)
    assert not _same(_copy(subject), expected)


def test_a_loaded_checkpoint_is_not_reported_as_a_new_save(
    subject: Subject, checkpoint: Checkpointer
) -> None:
    subject.state.progress.step = 1
    checkpoint.save("periodic")
    checkpoint.finish_pending(must=True)
    reported = checkpoint.has_unreported_save  # all ranks would drop the lines up to step 1
    state = SavedState.read(checkpoint.store.folder / "step-00000001")

    checkpoint.load(CheckpointRef(1, 0, 0, state))

    assert reported
    assert not checkpoint.has_unreported_save  # an outstanding validation may have added a line


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_save_starts_no_further_threads(tmp_path: Path, dtype: torch.dtype) -> None:
    subject = make_subject(10)
    subject.model.to(dtype).register_parameter("filters", nn.Parameter(
        torch.ones(256, 256, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)))
    subject.state.__post_init__()  # as if the model had been made with it
    checkpoint = make_checkpointer(subject, tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        checkpoint._writer.submit(torch.get_num_threads).result(LIMIT_S)
        torch.ones(10**6).add_(1)  # starts this thread's own threads
        threads = set(os.listdir("/proc/self/task"))
        subject.state.progress.step = 1
        checkpoint.save("periodic")
        checkpoint.finish_pending(must=True)
        new = set(os.listdir("/proc/self/task")) - threads
    finally:
        torch.set_num_threads(before)
        checkpoint.abandon()
        checkpoint.store.close()

    assert not new


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
