"""Rows of Parquet files as a stream, read by row group; needs pyarrow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.order import KeyedPermutation
from trainer.data.shards import KeyedStream, Transform, list_files
from trainer.distributed.partition import block
from trainer.errors import ConfigError


class ParquetStream(KeyedStream):
    """The rows of Parquet files: dicts of column name → value.

    In each epoch the row groups are shuffled, and the rows within each: an order that is computed
    where it is needed. The lanes are equal parts of it, of any number. A lane holds one row group
    of the chosen columns in memory, and a resumed lane reads its current row group again.

    Values: numpy scalars for columns of numbers, numpy arrays for lists of numbers, and Python
    objects (str, bytes, dict, None, …) otherwise, also for a row group in which a value is missing.

    Args:
        files: paths or patterns of local files.
        columns: names of the columns to read; None: all.
        shuffle: whether to shuffle; otherwise the order of the files.
        transform: applied to each row.

    Raises:
        ConfigError: a file can't be read or lacks a column, columns have different types in two
            files, or pyarrow is not installed.
    """

    def __init__(self, files: str | Path | Sequence[str | Path], *,
                 columns: Sequence[str] | None = None, shuffle: bool = True,
                 transform: Transform | None = None) -> None:
        self.columns, self.shuffle, self.transform = columns, shuffle, transform
        self._files = list_files(files, "ParquetStream: files")
        self._groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        first = None
        for path in self._files:
            footer = _open(path)
            schema = footer.schema_arrow
            if unknown := [name for name in columns or () if name not in schema.names]:
                raise ConfigError(f"ParquetStream: columns: {path} has no column {unknown[0]!r}; "
                                  f"its columns are {', '.join(schema.names)}.")
            types = {name: schema.field(name).type for name in columns or schema.names}
            first = first or types
            if types != first:
                name = next(n for n in {**first, **types} if first.get(n) != types.get(n))
                raise ConfigError(
                    f"ParquetStream: the column {name!r} is {types.get(name, 'missing')} in {path} "
                    f"and {first.get(name, 'missing')} in {self._files[0]}; choose the columns "
                    "that are equal in all files by columns=[…].")
            rows = [footer.metadata.row_group(g).num_rows
                    for g in range(footer.metadata.num_row_groups)]
            self._groups += [(path, number) for number, size in enumerate(rows) if size]
            sizes += filter(None, rows)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._layout: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return int(self._sizes.sum())

    def lane(self, number: int, lanes: int) -> ParquetLane:
        return ParquetLane(self, block(len(self), number, lanes))

    def read(self, places: range) -> Iterator[dict[str, Any]]:
        """The rows at the first of these places of the epoch's order, up to the end of their row
        group."""
        order, ends = self._order()
        at = int(np.searchsorted(ends, places.start, side="right"))
        group = order[at]
        begin = int(ends[at]) - int(self._sizes[group])
        wanted = np.arange(places.start, min(places.stop, int(ends[at]))) - begin
        if self.shuffle:
            wanted = KeyedPermutation(int(self._sizes[group]), self.key)(1 + int(group), wanted)
        path, number = self._groups[group]
        try:
            # One thread, as in all loaders, and because a loader process is a fork.
            table = _open(path).read_row_group(number, columns=self.columns, use_threads=False)
            columns = {name: _values(table.column(name).take(wanted))
                       for name in table.column_names}
        except (OSError, ValueError) as error:  # of pyarrow
            raise OSError(f"{path}, row group {number}: {error}") from error
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The row groups in the order of the epoch, and the place after the last row of each."""
        if self._layout is None or self._layout[0] != self.key:
            order = np.arange(len(self._sizes))
            if self.shuffle:
                order = KeyedPermutation(len(order), self.key)(0, order)
            self._layout = self.key, order, np.cumsum(self._sizes[order])
        return self._layout[1:]


class ParquetLane(Iterator[Any]):
    """Iterator over a range of places; its state is the number of rows taken."""

    def __init__(self, stream: ParquetStream, places: range) -> None:
        self._stream, self._places, self._taken = stream, places, 0
        self.draws = stream.transform is not None
        self._rows: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        if self._taken == len(self._places):
            raise StopIteration
        row = next(self._rows, None)
        if row is None:
            self._rows = self._stream.read(self._places[self._taken:])
            row = next(self._rows)
        self._taken += 1
        return row if self._stream.transform is None else self._stream.transform(row)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._taken, self._rows = state["taken"], iter(())


def _open(path: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError("trainer.data.parquet needs pyarrow: pip install 'trainer[parquet]'."
                          ) from error
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"ParquetStream: {path}: {error}") from error


def _values(column: Any) -> Iterator[Any]:
    """The values of a column of pyarrow, which alone stays in memory."""
    import pyarrow as pa

    def numbers(array: Any) -> np.ndarray | None:
        kind = array.type
        return None if array.null_count or not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        ) else np.array(array.to_numpy(zero_copy_only=False))  # a copy, which may be changed

    kind, array = column.type, column.combine_chunks()
    is_list = (pa.types.is_list(kind) or pa.types.is_large_list(kind)
               or pa.types.is_fixed_size_list(kind)) and not array.null_count
    flat = numbers(array.flatten() if is_list else array)
    if flat is None:
        return (value.as_py() for value in array)
    if not is_list:
        return iter(flat)
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False)).tolist()
    return (flat[start:end] for start, end in itertools.pairwise([0, *ends]))
