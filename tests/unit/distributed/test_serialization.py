"""Packed tensors; `tests/ranks/test_world.py` shows that each dtype and layout keeps its bits."""

from __future__ import annotations

import pytest
import torch

from trainer.distributed import serialization
from trainer.run.proof import content


@pytest.mark.parametrize("other", [
    [torch.zeros(3, 2)], [torch.zeros(2, 3, dtype=torch.int32)], [torch.zeros(3), torch.zeros(3)]])
def test_tensors_of_another_layout_are_refused(other: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="the sender's tensors differ"):
        serialization.unpack(serialization.pack([torch.ones(2, 3)]), other)


def test_a_single_element_of_a_column_has_bytes() -> None:
    column = torch.arange(6.0).reshape(2, 3)[:1, 1]  # its stride is 3, and it is contiguous
    made = torch.empty(1)
    serialization.unpack(serialization.pack([column]), [made])

    assert torch.equal(made, column)
    assert content(column) == content(column.clone()) != content(column + 1)
