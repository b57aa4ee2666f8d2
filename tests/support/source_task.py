"""A regression on samples that are stored in Parquet files or tar shards, read in several ways."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer import Outcome
from trainer.data.hugging_face import HuggingFaceStream
from trainer.data.parquet import ParquetStream
from trainer.data.shards import ShuffledBlocks
from trainer.data.tar_shards import TarStream, decode_fields

WIDTH = 8


def write_parquet(folder: Path, *, files: int = 8, rows: int = 100, group: int = 30) -> None:
    """Files of `rows` rows: an id, x (a list), its sum y, and a text that the task doesn't need."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        x = _inputs(number, rows)
        pq.write_table(pa.table({"id": np.arange(rows) + number * rows, "x": list(x),
                                 "y": x.sum(1), "text": ["a"] * rows}),
                       folder / f"{number}.parquet", row_group_size=group)


def write_tars(folder: Path, *, files: int = 8, samples: int = 100) -> None:
    """Tar files of samples of an id and x."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row, x in enumerate(_inputs(number, samples)):
                array = io.BytesIO()
                np.save(array, x)
                name = f"train/{number * samples + row:06d}"
                add(tar, f"{name}.cls", str(number * samples + row).encode())
                add(tar, f"{name}.x.npy", array.getvalue())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _inputs(number: int, rows: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(rows, WIDTH)).astype(np.float32)


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation, which draws."""
    return {**sample, "x": sample["x"] + 0.1 * torch.randn(WIDTH).numpy()}


def tar_sample(sample: dict[str, Any]) -> dict[str, Any]:
    found = decode_fields(sample)
    return noisy({"x": found["x.npy"], "y": found["x.npy"].sum()})


@dataclass(frozen=True)
class Sources:
    folder: str = "."
    kind: str = "parquet"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        parquet, tars = f"{self.folder}/*.parquet", f"{self.folder}/*.tar"
        if self.kind == "parquet":
            return ParquetStream(parquet, columns=["x", "y"], transform=noisy)
        if self.kind == "tar":
            return TarStream(tars, transform=tar_sample)
        if self.kind == "tar-blocks":
            return ShuffledBlocks(TarStream(tars, transform=None), 16, tar_sample)
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.load_dataset("parquet", data_files=parquet, split="train",
                                     columns=["x", "y"], streaming=self.kind != "hf-memory",
                                     cache_dir=f"{self.folder}/cache").with_format("torch")
        if self.kind == "hf-memory":
            return rows
        stream = HuggingFaceStream(rows)
        return ShuffledBlocks(stream, 16) if self.kind == "hf-blocks" else stream

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Outcome:
        x, y = batch["x"].float(), batch["y"].float()
        return Outcome((model(x).squeeze(1) - y).square().sum(), len(x))
