"""Runs on Parquet files, tar shards and Hugging Face's `datasets`, killed and on other ranks."""

from __future__ import annotations

import pytest
from runs import until_done
from source_task import write_parquet, write_tars

from trainer.commands.compare import differences


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tars(folder)
    pytest.importorskip("pyarrow", reason="needs the test extra: pip install -e '.[test]'")
    write_parquet(folder)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [
    "parquet", "tar-blocks", "hf",
    *(pytest.param(kind, marks=pytest.mark.long) for kind in ("tar", "hf-blocks", "hf-memory"))])
def test_a_killed_run_ends_with_the_same_bits_on_two_and_then_three_ranks(
    ranks, undisturbed, data, tmp_path, kind
):
    if kind.startswith("hf"):
        pytest.importorskip("datasets", reason="needs the test extra: pip install -e '.[test]'")
    arguments = ("--task=source_task:Sources", f"--task.folder={data}", f"--task.kind={kind}",
                 "--device=cpu", "--batch.global-size=16", "--batch.micro-size=4", "--steps=40",
                 "--checkpoint.every=6", "--eval.every=off", "--parallel.reduction=canonical",
                 "--data.workers=0")

    ends = until_done(ranks, (2, 2, 3), tmp_path / "run", *arguments, "--inject=kill:step=5",
                      "--inject=kill:rank=1:step=8:phase=data",
                      "--inject=kill:rank=2:step=35:phase=optimizer")

    assert [sorted(codes) for codes in ends] == [[-9, 1], [-9, 1], [-9, 1, 1], [0, 0, 0]]
    found = differences(undisturbed(2, *arguments), tmp_path / "run")
    assert [one for one in found if not one.startswith("world size is")] == []
