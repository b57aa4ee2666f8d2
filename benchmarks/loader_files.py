"""How fast are samples read from files, and does a ResNet-18 step wait for them?

`python -m benchmarks.loader --files`: JPEG files of 224x224 pixels (images of the bundled sample,
enlarged) in folders and in tar shards, and rows of Parquet files (eight floats in a list, a float,
and a column that nobody needs). Batches of 32; the images are cropped at random to 224x224,
mirrored and normalised. Peers read the same files as their documentation shows.
"""

from __future__ import annotations

import functools
import io
import itertools
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks import reporting
from benchmarks.loader import AHEAD, CPU, MICRO, Contestant, loader_of, measure, ours, show
from examples import bare_loop
from trainer.data.parquet import ParquetStream
from trainer.data.stream import StreamReader
from trainer.data.stream_reader import StreamSpec
from trainer.data.tar_shards import TarStream, decode_fields
from trainer.tasks.image_models import classifier
from trainer.tasks.photos import IMAGENET, Photos

SIDE, IMAGES, SHARDS = 224, 2048, 8
ROWS, PARQUET_FILES, GROUP = 64_000, 8, 4000
LANES = 2
ON_TENSORS = v2.Compose([
    v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip(),
    v2.ToDtype(torch.float32, scale=True), v2.Normalize(*map(list, IMAGENET))])
PICTURES = ("trainer, photos (PIL)", "trainer, torchvision.io", "DataLoader, PIL",
            "trainer, tars", "webdataset, tars")
TABLES = ("trainer, Parquet", "StatefulDataLoader, Parquet", "torchdata.nodes, Parquet",
          "HF datasets, Parquet")


def write(folder: Path) -> None:
    """Write the JPEG files, the tars with their bytes, and the Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images, labels, *_ = bare_loop.read_sample()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard * IMAGES // SHARDS, (shard + 1) * IMAGES // SHARDS):
                large = Image.fromarray(images[number]).convert("RGB").resize((SIDE, SIDE))
                file = io.BytesIO()
                large.save(file, "jpeg", quality=90)
                place = folder / "train" / str(labels[number])
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{number}.jpg").write_bytes(file.getvalue())
                for field, content in (("jpg", file.getvalue()),
                                       ("cls", str(labels[number]).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{field}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    for number in range(PARQUET_FILES):
        count = ROWS // PARQUET_FILES
        x = np.random.default_rng(number).normal(size=(count, 8)).astype(np.float32)
        pq.write_table(pa.table({"x": list(x), "y": x.sum(1), "text": ["-" * 50] * count}),
                       folder / f"{number}.parquet", row_group_size=GROUP)


def streamed(data: Any, workers: int) -> Contestant:
    """This trainer's loader on a stream."""
    step = 0
    spec = StreamSpec(dataset=data, lanes=LANES, micro_size=MICRO, seed=0)
    loader = loader_of(StreamReader(
        spec, rank=0, num_ranks=1, workers=workers, prefetch=AHEAD, device=CPU,
        step=lambda: step, gather=lambda value: [value]), workers)

    def batches() -> Iterator[Any]:
        nonlocal step
        while True:
            window = list(loader.window())
            if any(micro.samples < MICRO for micro in window):
                loader.next_epoch()
                continue
            step += 1
            yield from (micro.batch for micro in window)

    return Contestant(batches(), loader.close)


def endless(make: Callable[[], Any]) -> Contestant:
    """Epochs of a peer's loader, one after the other."""
    loader = make()
    return Contestant(itertools.chain.from_iterable(itertools.repeat(loader)), lambda: None)


def as_tensors(sample: dict[str, Any]) -> tuple[Any, int]:
    found = decode_fields(sample)
    return ON_TENSORS(found["jpg"]), found["cls"]


def picture_loader(folder: Path, name: str, workers: int) -> Contestant:
    """A contestant of the images."""
    tars = sorted(map(str, folder.glob("*.tar")))
    if name == "trainer, photos (PIL)":
        return ours(workers, Photos(root=str(folder), validation_fraction=0).dataset("train"))
    if name == "trainer, torchvision.io":
        from torchvision.io import decode_image

        return ours(workers, ImageFolder(folder / "train", ON_TENSORS, loader=functools.partial(
            decode_image, mode="RGB")))
    if name == "trainer, tars":
        return streamed(TarStream(tars, transform=as_tensors), workers)
    options: dict[str, Any] = {
        "batch_size": MICRO, "num_workers": workers, "drop_last": True,
        "persistent_workers": workers > 0, "prefetch_factor": AHEAD if workers else None}
    if name == "DataLoader, PIL":
        usual = v2.Compose([
            v2.RandomResizedCrop(SIDE), v2.RandomHorizontalFlip(), v2.PILToTensor(),
            *ON_TENSORS.transforms[2:]])
        return endless(lambda: DataLoader(ImageFolder(folder / "train", usual), shuffle=True,
                                          **options))
    import webdataset

    shards = (webdataset.WebDataset(tars, shardshuffle=SHARDS).decode("pil")
              .to_tuple("jpg", "cls").map_tuple(v2.Compose([v2.PILToTensor(), ON_TENSORS]), int))
    return endless(lambda: DataLoader(shards, **options))


class OwnRows(IterableDataset[Any]):
    """What a user would write: row groups dealt to the workers, shuffled in memory."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for path in self.files[first::every]:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=["x", "y"]).to_pylist()
                yield from (rows[i] for i in torch.randperm(len(rows)).tolist())


def stacked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float32)
            for name in ("x", "y")}


def table_loader(folder: Path, name: str, workers: int) -> Contestant:
    """A contestant of the Parquet files."""
    files = sorted(map(str, folder.glob("*.parquet")))
    if name == "trainer, Parquet":
        return streamed(ParquetStream(files, columns=["x", "y"]), workers)
    options: dict[str, Any] = {"batch_size": MICRO, "num_workers": workers, "drop_last": True}
    if name == "StatefulDataLoader, Parquet":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return endless(lambda: StatefulDataLoader(OwnRows(files), collate_fn=stacked, **options))
    if name == "torchdata.nodes, Parquet":
        from torchdata import nodes

        rows = nodes.Batcher(nodes.IterableWrapper(OwnRows(files)), MICRO, drop_last=True)
        return endless(lambda: nodes.Loader(nodes.ParallelMapper(
            rows, stacked, num_workers=max(1, workers), method="thread")))
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True,
                                 columns=["x", "y"], cache_dir=str(folder / "cache"))
    return endless(lambda: DataLoader(rows.shuffle(seed=0, buffer_size=GROUP).with_format("torch"),
                                      **options))


def report(machine: dict[str, Any], workers: list[int], rounds: int, seconds: float) -> None:
    """Measure and print both tables."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        torch.manual_seed(0)
        for names, make, model in ((PICTURES, picture_loader, classifier("resnet18", 10, SIDE)),
                                   (TABLES, table_loader, None)):
            part = measure(names, functools.partial(make, Path(folder)), workers, rounds, seconds,
                           model=model, step_rounds=min(3, rounds), steps=1)
            found |= part
            print(f"n = {rounds} turns\n{show(part, 'a ResNet-18 step')}")
    reporting.print_json("loader", machine=machine, contestants=found)
