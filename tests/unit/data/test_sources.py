"""Streams of Parquet files, tars and Hugging Face's `datasets`: their lanes, state, errors."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from source_task import add, write_parquet, write_tars

from trainer.data import parquet
from trainer.data.hugging_face import HuggingFaceStream
from trainer.data.map_dataset import begin_epoch
from trainer.data.parquet import ParquetStream
from trainer.data.shards import ShuffledBlocks
from trainer.data.stream_reader import LaneIterator, LanePosition, StreamSpec
from trainer.data.tar_shards import TarStream, decode_fields
from trainer.errors import ConfigError

FILES, ROWS = 4, 25
TRAINER_TEST = "needs the test extra: pip install -e '.[test]'"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four files of 25 samples in each form, the Parquet files in row groups of 10, 10 and 5."""
    folder = tmp_path_factory.mktemp("data")
    write_tars(folder, files=FILES, samples=ROWS)
    if parquet_is_installed():
        write_parquet(folder, files=FILES, rows=ROWS, group=10)
    return folder


def parquet_is_installed() -> bool:
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def numbered(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of a tar file with its id and a draw, as the others have them."""
    return drawn({"id": int(sample["cls"])})


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(sample["id"]), "draw": torch.rand(()).item()}


def hugging_face(data: Path) -> HuggingFaceStream:
    datasets = pytest.importorskip("datasets", reason=TRAINER_TEST)
    datasets.disable_progress_bars()
    return HuggingFaceStream(datasets.load_dataset(
        "parquet", data_files=f"{data}/*.parquet", split="train", streaming=True,
        cache_dir=f"{data}/cache").map(drawn))


def tars(data: Path, transform: Any) -> TarStream:
    return TarStream(f"{data}/*.tar", transform=transform)


KINDS = {
    "tar": lambda data: tars(data, numbered),
    "tar in blocks": lambda data: ShuffledBlocks(tars(data, None), 7, numbered),
    "tar in blocks that draw": lambda data: ShuffledBlocks(tars(data, numbered), 7),
    "parquet": lambda data: ParquetStream(f"{data}/*.parquet", transform=drawn),
    "parquet in order": lambda data: ParquetStream(f"{data}/*.parquet", shuffle=False,
                                                   transform=drawn),
    "hf": hugging_face, "hf in blocks": lambda data: ShuffledBlocks(hugging_face(data), 7)}


def source(kind: str, data: Path) -> Any:
    if not kind.startswith("tar"):
        pytest.importorskip("pyarrow", reason=TRAINER_TEST)
    return KINDS[kind](data)


def lane(stream: Any, number: int, *, epoch: int = 0, lanes: int = 3,
         mark: LanePosition | None = None, windows: int = 0) -> LaneIterator:
    """A lane as a run reads it, a sample a window."""
    begin_epoch(stream, epoch, seed=1)
    spec = StreamSpec(dataset=stream, lanes=lanes, micro_size=1, seed=1)
    return LaneIterator(spec, number=number, epoch=epoch, mark=mark or LanePosition(),
                        windows=windows)


def rest(iterator: LaneIterator) -> list[tuple[int, Any, float]]:
    """The remaining samples: place, id, draw."""
    found = []
    while taken := iterator.take():
        found += [(place, int(sample["id"]), float(sample["draw"])) for place, sample in taken]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_are_an_epoch_and_are_shuffled_by_seed_and_epoch(data, kind):
    found = {epoch: [rest(lane(source(kind, data), number, epoch=epoch)) for number in range(3)]
             for epoch in (0, 1)}
    again = [rest(lane(source(kind, data), number)) for number in range(3)]

    assert again == found[0]
    ids = {epoch: [one for part in parts for _, one, _ in part] for epoch, parts in found.items()}
    for order in ids.values():
        assert sorted(order) == list(range(FILES * ROWS))
    assert (ids[0] == ids[1]) == (kind in ("parquet in order", "hf"))
    if kind.startswith("parquet"):
        assert [len(part) for part in found[0]] == [33, 33, 34]
    if kind == "parquet":
        groups = [ids[0][at:at + 5] for at in range(0, 100, 5)]  # two or one a row group
        assert all(max(part) - min(part) < 10 for part in groups)
        assert not any(part == sorted(part) for part in groups)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_resumes_twice_at_each_of_its_samples_with_the_same_draws(data, kind):
    stream = source(kind, data)
    samples = rest(lane(stream, 1))

    for place in range(0, len(samples), 3 if kind[:2] != "hf" else 8):
        straight = lane(stream, 1, windows=place)
        mark = straight.mark(place)

        resumed = lane(source(kind, data), 1, mark=mark, windows=place)

        assert json.loads(json.dumps(mark.state)) == mark.state
        resumed.take()  # and once more, soon after the first time
        second = lane(source(kind, data), 1, mark=resumed.mark(place + 1), windows=place + 1)
        assert rest(resumed) == rest(second) == samples[place + 1:], place


def test_a_resumed_lane_reads_nothing_of_what_came_before(data, monkeypatch):
    tars, headers = TarStream(f"{data}/*.tar", shuffle=False), []
    one = lane(tars, 0, lanes=1, windows=60)
    monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(
        lambda kind, tar, read=tarfile.TarInfo.fromtarfile: headers.append(tar) or read(tar)))

    resumed = lane(TarStream(f"{data}/*.tar", shuffle=False), 0, lanes=1, mark=one.mark(60),
                   windows=60)

    assert resumed.take()[0][1]["cls"] == 60
    assert len(headers) <= 4  # the first of the file, and three from the sample's own on


def test_a_resumed_lane_reads_its_row_group_alone(data, monkeypatch):
    pytest.importorskip("pyarrow", reason=TRAINER_TEST)
    stream = ParquetStream(f"{data}/*.parquet", shuffle=False)
    mark = lane(stream, 0, lanes=1, windows=63).mark(63)
    opened = []
    monkeypatch.setattr(parquet, "_open", lambda path, read=parquet._open: (
        opened.append(path.name), read(path))[1])

    resumed = lane(stream, 0, lanes=1, mark=mark, windows=63)

    assert [sample["id"] for ((_, sample),) in (resumed.take() for _ in range(7))] == (
        list(range(63, 70)))
    assert opened == ["2.parquet"]


def test_values_of_parquet_columns_keep_their_types_and_may_be_changed(tmp_path):
    pa = pytest.importorskip("pyarrow", reason=TRAINER_TEST)
    import pyarrow.parquet as pq

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(9, dtype=np.int16)), 3)
    pq.write_table(pa.table({
        "f": pa.array([1, 2, 3], pa.float32()), "b": [True, False, True], "v": vectors,
        "l": [[1.0], [], [2.0, 3.0]], "s": ["a", "", "c"], "raw": [b"1", b"", b"3"],
        "gap": [1, None, 3], "deep": [{"k": [1]}, None, {"k": []}]}), tmp_path / "a.parquet")

    rows = list(ParquetStream(tmp_path / "a.parquet", shuffle=False))
    rows[0]["v"] += 1

    assert [row["f"].dtype for row in rows] == [np.float32] * 3
    assert [row["v"].tolist() for row in rows] == [[1, 2, 3], [3, 4, 5], [6, 7, 8]]
    assert rows[0]["v"].dtype == np.int16
    assert [row["l"].tolist() for row in rows] == [[1.0], [], [2.0, 3.0]]
    assert [tuple(row[name] for name in ("b", "s", "raw", "gap", "deep")) for row in rows] == [
        (True, "a", b"1", 1, {"k": [1]}), (False, "", b"", None, None),
        (True, "c", b"3", 3, {"k": []})]
    assert [*next(iter(ParquetStream(tmp_path / "*", columns=["s", "f"])))] == ["s", "f"]


def test_what_is_wrong_with_parquet_files_is_named_before_the_start(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason=TRAINER_TEST)
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.5], "y": [1]}), tmp_path / "b.parquet")
    (tmp_path / "c.bin").write_bytes(b"nothing at all")

    for files, columns, message in (
            ("a.parquet", ["z"], "a.parquet has no column 'z'; its columns are x, y"),
            ("*.parquet", None, "'x' is double in .*b.parquet and int64 in .*a.parquet"),
            ("c.bin", None, "c.bin: Parquet magic bytes not found"),
            ("d/*.parquet", None, "d/[*].parquet: there is no such file in ")):
        with pytest.raises(ConfigError, match=message):
            ParquetStream(tmp_path / files, columns=columns)
    assert len(ParquetStream(tmp_path / "*.parquet", columns=["y"])) == 2
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainer\[parquet\]'"):
        ParquetStream(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", ["tar", "tar in blocks", "hf"])
def test_more_lanes_than_files_are_refused_with_the_flags_to_change(data, kind):
    with pytest.raises(ConfigError, match=r"4 .*can't be dealt to 5 lanes.*--batch\.micro-size"):
        lane(source(kind, data), 0, lanes=5)


def test_a_data_set_that_is_not_streamed_needs_no_class():
    datasets = pytest.importorskip("datasets", reason=TRAINER_TEST)
    with pytest.raises(ConfigError, match=r"return it itself.*to_iterable_dataset"):
        HuggingFaceStream(datasets.Dataset.from_dict({"x": [1]}))


def test_files_of_a_tar_are_grouped_by_their_names_and_decoded_by_their_extensions(tmp_path):
    picture, array = io.BytesIO(), io.BytesIO()
    Image.new("RGBA", (3, 2), (255, 0, 7, 9)).save(picture, "png")
    np.save(array, np.arange(3))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(".hidden"))
        for name, content in (
                ("a/1.png", picture.getvalue()), ("a/1.json", b'{"k": [1]}'), ("a/README", b"-"),
                ("a/1.left.npy", array.getvalue()), ("b/1.TXT", "é".encode()), ("b/1.pyd", b"\0"),
                (f"{'c' * 200}.cls", b"4"), ("b/1.cls", b"5")):
            add(tar, name, content)

    first, *others = TarStream(tmp_path / "a.tar")

    assert list(first) == ["__key__", "__url__", "png", "json", "left.npy"]
    assert first["png"].tolist() == [[[255] * 3] * 2, [[0] * 3] * 2, [[7] * 3] * 2]
    assert first["json"] == {"k": [1]}
    assert first["left.npy"].tolist() == [0, 1, 2]
    assert [{k: v for k, v in one.items() if k != "__url__"} for one in others] == [
        {"__key__": "b/1", "TXT": "é", "pyd": b"\0"}, {"__key__": "c" * 200, "cls": 4},
        {"__key__": "b/1", "cls": 5}]
    with pytest.raises(ValueError, match=r"x\.tar: cls of sample 7: invalid literal"):
        decode_fields({"__key__": "7", "__url__": "x.tar", "cls": b"four"})


def test_a_damaged_tar_is_named_with_the_offset(tmp_path):
    write_tars(tmp_path, files=1, samples=3)
    whole, path = (tmp_path / "0.tar").read_bytes(), tmp_path / "bad.tar"

    for content, offset in (
            (b"", 0), (whole[:100], 0), (gzip.compress(whole), 0),  # each member takes 1,024 bytes
            (whole[:2048], 2048), (whole[:3072 + 600], 3072), (whole[:2048 + 100], 2048),
            (whole[:3072] + b"x" + whole[3073:], 3072),
            (whole[:4096] + whole[3072:], 4096)):  # the file of a sample twice
        path.write_bytes(content)
        with pytest.raises(tarfile.ReadError, match=rf"bad\.tar at offset {offset}: .*damaged"):
            list(TarStream(path))


def test_no_module_imports_the_packages_of_its_extra():
    code = ("import sys, trainer, trainer.data.parquet, trainer.data.tar_shards, "
            "trainer.data.hugging_face; sys.exit(bool({'pyarrow', 'datasets'} & {*sys.modules}))")

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
