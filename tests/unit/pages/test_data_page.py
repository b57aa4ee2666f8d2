"""docs/data.md: the example of a stream is exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trainer.data.stream_reader import StreamSpec
from trainer.run.stream_proof import prove_stream

PAGE = (Path(__file__).parents[3] / "docs/data.md").read_text()


def test_the_mixture_of_parquet_files_is_exact(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    paths = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for path in paths:
        rows = {"x": [*range(100)], "y": [path] * 100, "z": [0.0] * 100}
        parquet.write_table(table(rows), path, row_group_size=10)
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(import pyarrow.*?)```", PAGE, re.DOTALL)[1], names)

    dataset = names["Mixture"](paths, lambda row: (row["y"][-9], row["x"]))
    proof = prove_stream(StreamSpec(dataset=dataset, lanes=2, micro_size=8, seed=1), range(2),
                         daemon=True)
    every = [[*dataset.lane(lane, 2)] for lane in range(2)]

    assert proof.tried[0] > 1
    assert (proof.problem, proof.unlike) == ("", "")
    assert {row for lane in every for row in lane} == {
        (name, x) for name in "ab" for x in range(100)}
    dataset.set_epoch(1)
    assert [*dataset.lane(0, 2)] != every[0]
