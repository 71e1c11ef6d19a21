"""Parquet: inputs, and shards of results. It needs pyarrow."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmpool.batch.folder import digest_of_file
from lmpool.batch.kinds import Columns, ResultWriter, Text
from lmpool.batch.lines import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_LINES,
    Chunk,
    CustomIds,
    Failed,
    Fields,
    Index,
    Line,
    Source,
    chunks,
)
from lmpool.errors import BatchError, SettingsError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingsError("format: Parquet needs pyarrow: pip install 'lmpool[parquet]', or use JSONL") from error

_READ_BYTES = 1 << 20  # Bytes of a column that are read at once; without a limit pyarrow reads a whole row group.
_NUMBER_BYTES = 8  # Bytes of a decoded number, at most: the file may hold it in fewer.
_GROUP_NUMBERS = 1 << 20  # Numbers in a row group of a shard: 4 to 8 MB, which a reader decodes for one text.
_HEAD = ("line", "custom_id", "ids", "start")


class ParquetSource(Source):
    """A Parquet file with the columns of `lmpool.batch.lines.Fields`; each row is a line."""

    def index(self, shard_lines: int) -> Index:
        """See `Source.index`."""
        ids, row = CustomIds(), 0
        with self._parquet() as (raw, file):
            digest = digest_of_file(self.path)
            if "custom_id" in file.schema_arrow.names:
                for batch in file.iter_batches(columns=["custom_id"]):
                    for row, value in enumerate(batch.column(0).to_pylist(), row + 1):  # noqa: B020 It counts on.
                        ids.add(row, value)
            rows: int = file.metadata.num_rows
            self.check(raw)
        starts = dict(enumerate(range(0, rows, shard_lines)))
        return Index("parquet", self.size, digest, rows, not rows, starts, ids.duplicates())

    def read(self, index: Index, shard_lines: int, shards: Collection[int]) -> Iterator[Chunk]:
        """See `Source.read`."""
        with self._parquet() as (raw, file):
            lines = _lines(file, shard_lines, set(shards))
            for shard, of_shard in groupby(lines, key=lambda line: line[0]):
                for chunk in chunks(shard, ((line, size) for _, line, size in of_shard)):
                    self.check(raw)
                    yield chunk

    @contextmanager
    def _parquet(self) -> Iterator[tuple[BinaryIO, Any]]:
        """The file, and a Parquet file of it. It is not memory-mapped: SIGBUS would end the process if it is cut."""
        with self.opened() as raw:
            try:
                yield raw, pq.ParquetFile(raw, buffer_size=_READ_BYTES)
            except (pa.ArrowException, OSError) as error:
                self.check(raw)
                raise BatchError(f"{self.path} cannot be read as Parquet: {error}") from error


def _lines(file: Any, shard_lines: int, shards: set[int]) -> Iterator[tuple[int, Line | Failed, int]]:
    """The rows of some shards, in order: shard, line, and its bytes, as a mean of some rows."""
    columns = [name for name in file.schema_arrow.names if name in Fields.__struct_fields__]
    at = 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        rows = metadata.num_rows
        if not _has_some(shards, shard_lines, at, rows):
            at += rows
            continue
        size = _rows_at_once(metadata, columns)
        for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=columns):
            if _has_some(shards, shard_lines, at, batch.num_rows):
                row_bytes = batch.nbytes // batch.num_rows
                for number, row in enumerate(batch.to_pylist(), at):
                    if (shard := number // shard_lines) in shards:
                        yield shard, _line_of(number + 1, row), row_bytes
            at += batch.num_rows


def _rows_at_once(group: Any, columns: list[str]) -> int:
    """Rows of a row group to decode at once: up to `MAX_CHUNK_LINES`, of up to `MAX_CHUNK_BYTES` if they are alike."""
    all_columns = (group.column(number) for number in range(group.num_columns))
    read = [column for column in all_columns if column.path_in_schema.partition(".")[0] in columns]
    size: int = sum(max(_NUMBER_BYTES * column.num_values, column.total_uncompressed_size) for column in read)
    rows: int = MAX_CHUNK_BYTES * group.num_rows // max(1, size)
    return max(1, min(MAX_CHUNK_LINES, rows))


def _has_some(shards: set[int], shard_lines: int, first: int, rows: int) -> bool:
    return not shards.isdisjoint(range(first // shard_lines, -(-(first + rows) // shard_lines)))


def _line_of(number: int, row: dict[str, Any]) -> Line | Failed:
    try:
        return Line(number, msgspec.convert(row, Fields))
    except msgspec.ValidationError as error:
        return Failed(number, None, f"unusable: {error}")


class ParquetWriter(ResultWriter):
    """Writes a row for each text: line, custom_id, ids, start, and each column as a list, or as a list of lists."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._results: list[tuple[Text, Columns]] = []
        self._numbers = 0
        self._writer: Any = None

    def write(self, text: Text, columns: Columns) -> None:
        """See `ResultWriter.write`."""
        self._results.append((text, columns))
        self._numbers += len(text.ids) + sum(values.size for values in columns.values())
        if self._numbers >= _GROUP_NUMBERS:
            self._write_group()

    def close(self) -> None:
        """See `ResultWriter.close`."""
        if self._results or self._writer is None:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        texts = [text for text, _ in self._results]
        arrays: dict[str, Any] = {
            "line": pa.array([text.line for text in texts], pa.int64()),
            "custom_id": pa.array([text.custom_id for text in texts], pa.string()),
            "ids": _lists([np.array(text.ids, np.int64) for text in texts]),
            "start": pa.array([text.span.start for text in texts], pa.int64()),
        }
        for name in self._results[0][1] if texts else ():
            arrays[name] = _lists([columns[name] for _, columns in self._results])
        table = pa.table(arrays)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._results, self._numbers = [], 0


def _lists(arrays: list[NDArray[Any]]) -> Any:
    """A list for each array; for arrays with two axes, lists of lists of equal length."""
    values: NDArray[Any] = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
    flat = pa.array(values.ravel())
    if values.ndim == 2:
        flat = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


class ParquetReader:
    """Reads a shard that `ParquetWriter` wrote, a row group at a time, and keeps the last one."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path, memory_map=True)
        rows = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._ends = np.cumsum([0, *rows])
        self._group, self._table = -1, None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def answer(self, at: int) -> dict[str, Any]:
        """See `ShardReader.answer`."""
        group = int(np.searchsorted(self._ends, at, side="right")) - 1
        if group != self._group:
            self._group, self._table = group, self._file.read_row_group(group).combine_chunks()
        table: Any = self._table
        row = at - int(self._ends[group])
        values = {name: table.column(name).chunk(0)[row] for name in table.column_names}
        head = {"line": values["line"].as_py(), "custom_id": values["custom_id"].as_py() or ""}
        head |= {"ids": _array(values["ids"]), "start": values["start"].as_py()}
        return head | {name: _array(value) for name, value in values.items() if name not in _HEAD}

    def custom_ids(self) -> Iterator[str]:
        """See `ShardReader.custom_ids`."""
        for value in self._file.read(columns=["custom_id"]).column(0).to_pylist():
            yield value or ""


def _array(value: Any) -> NDArray[Any]:
    """A list of a table, (n,) or (n, k), as a view of the table."""
    values = value.values
    if not pa.types.is_fixed_size_list(values.type):
        return np.asarray(values)
    return np.asarray(values.flatten()).reshape(-1, values.type.list_size)
