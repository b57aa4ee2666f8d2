"""Where ranks have different numbers of micro-batches, the result is that of one rank."""

from __future__ import annotations

import pytest
from runs import run, steps, validations

from trainer.commands.compare import differences

TASK = ["--task=cloud_task:Clouds", "--device=cpu", "--batch.global-size=12",
        "--batch.micro-size=4", "--steps=6", "--eval.every=3",
        "--data.drop-last=off", "--eval.batch-size=2"]  # fmt: skip
"""Windows of 3, 3 and 2 micro-batches; 5 batches of validation and one of the test."""


@pytest.mark.parametrize("more", [
    ["--data.workers=1", "--task.calls", "--numerics.anomaly=on"],
    ["--data.workers=0", "--task.stream", "--task.graphs", "--task.samples=29"],
], ids=["lists", "stream of objects"])  # fmt: skip
def test_the_losses_are_those_of_one_rank(ranks, undisturbed, tmp_path, more):
    one = undisturbed(1, *TASK, *more)

    for size in (2, 3):
        folder = run(ranks, size, tmp_path / str(size), *TASK, *more)
        for read, names in ((steps, ("loss", "grad_norm", "samples")),
                            (validations, ("val_loss", "val_error", "train_loss"))):
            expected, found = ([line[n] for line in read(f) for n in names] for f in (one, folder))
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("more", [
    ["--data.workers=0", "--task.graphs", "--task.norm"],
    ["--data.workers=0", "--task.stream", "--task.norm", "--task.samples=29"],
], ids=["objects", "stream"])  # fmt: skip
def test_the_canonical_reduction_gives_the_bits_of_one_rank(ranks, undisturbed, tmp_path, more):
    arguments = [*TASK, *more, "--parallel.reduction=canonical"]

    one, three = undisturbed(1, *arguments), run(ranks, 3, tmp_path / "three", *arguments)

    # Of buffers other than a batch norm's, the last rank's are kept.
    assert [d for d in differences(one, three) if "seen" not in d] == []
